"""Fuyu's processor: the image's rows of patches, then `<s>` and the text.

Before: `<s> what is it`. After: `(|SPEAKER|*columns |NEWLINE|)*rows <s> what is it <0x04>`; only
the `|SPEAKER|` take embeddings. A prompt without an image is unchanged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from mmjax.errors import RequestValueError, check_settings
from mmjax.models.family import FamilyInfo, Target, item_fields, make_factories
from mmjax.models.fuyu.host_inputs import FuyuHostInputs
from mmjax.processing.image_processors.affine import make_affine
from mmjax.processing.image_processors.image import fit_within, patchify, to_pixels
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_image_settings
from mmjax.processing.items.parse import ImageSize, ImagesOnlyDataParser
from mmjax.processing.tensors.fields import MultiModalFieldConfig

IMAGE_TOKEN, NEWLINE_TOKEN = "|SPEAKER|", "|NEWLINE|"
START_TOKEN, ANSWER_TOKEN = "<s>", "<0x04>"
CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {{- message.content + '\n' -}}
{%- endfor -%}
"""
"""A line for each message: the model was trained on one question, which ends with a newline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FuyuImageProcessor:
    """HF's `FuyuImageProcessorPil`, which needs torch, with its defaults."""

    size: Mapping[str, int] = field(default_factory=lambda: {"height": 1080, "width": 1920})
    """Larger images are scaled down to fit; none is scaled up."""
    patch_size: Mapping[str, int] = field(default_factory=lambda: {"height": 30, "width": 30})
    resample: int = Image.Resampling.BILINEAR
    padding_value: float = 1.0
    """Fills the last row and column of patches, before the pixels are rescaled."""
    rescale_factor: float = 1 / 255
    image_mean: float | Sequence[float] = 0.5
    image_std: float | Sequence[float] = 0.5

    def fit(self, size: ImageSize) -> ImageSize:
        """Return an image's size after scaling."""
        limit = ImageSize(**self.size)
        fitted = fit_within(size, limit)
        if min(fitted) < 1:
            raise RequestValueError(
                f"image is {size.width}x{size.height} pixels: its short side would have none when "
                f"it is scaled to fit {limit.width}x{limit.height}; crop it",
                param="multi_modal_data",
            )
        return fitted

    def get_grid(self, size: ImageSize) -> tuple[int, int]:
        """Return an image's number of rows and columns of patches."""
        fitted, patch = self.fit(size), self.patch_size
        return math.ceil(fitted.height / patch["height"]), math.ceil(fitted.width / patch["width"])

    def make_patches(self, image: Image.Image) -> np.ndarray:
        """Return uint8[rows * columns, patch_height * patch_width * 3]."""
        size = ImageSize(*image.size)
        fitted = self.fit(size)
        if fitted != size:
            image = image.resize(fitted, resample=Image.Resampling(self.resample))
        rows, columns = self.get_grid(size)
        patch_height, patch_width = self.patch_size["height"], self.patch_size["width"]
        missing = (rows * patch_height - fitted.height, columns * patch_width - fitted.width)
        widths = ((0, 0), (0, missing[0]), (0, missing[1]))
        pixels = np.pad(to_pixels(image), widths, constant_values=self.padding_value)
        return patchify(pixels, patch_height, patch_width)

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return frozenset(self.__dataclass_fields__)

    def __call__(
        self, images: Sequence[Image.Image], *, return_tensors: str, **kwargs: Any
    ) -> dict[str, np.ndarray]:
        """Return `image_patches`, uint8[patches, values], `image_grid_hw`, and `image_affine`."""
        own = self.with_kwargs(kwargs)
        grids = [own.get_grid(ImageSize(*image.size)) for image in images]
        return {
            "image_grid_hw": np.array(grids, np.int64),
            "image_patches": np.concatenate([own.make_patches(image) for image in images]),
            "image_affine": make_affine(
                rescale_factor=own.rescale_factor, mean=own.image_mean, std=own.image_std
            ),
        }

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> "FuyuImageProcessor":
        """Return the same under an HF call's kwargs."""
        if kwargs.get("patch_size", self.patch_size) != self.patch_size:
            raise RequestValueError(
                f"`patch_size` in mm_processor_kwargs must be the model's, {self.patch_size}; "
                "leave it out",
                param="mm_processor_kwargs",
            )
        return replace(self, **kwargs)


_FIXED_SETTINGS = {
    **dict.fromkeys(("do_resize", "do_pad", "do_rescale", "do_normalize"), True),
    "padding_mode": "constant",
}


class FuyuProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = {"Caption": "Generate a coco-style caption."}
    data_parser = ImagesOnlyDataParser
    host_inputs = FuyuHostInputs
    limits: ClassVar = {"image": 1}
    embed_token = IMAGE_TOKEN
    reserves_embed_token = True

    def load_hf_processor(self) -> ProcessorOfParts:
        """Return mmjax's own: HF's processor needs torch."""
        settings = load_image_settings(self.ctx.model_config.path)
        where, source = "the image processor", "the model takes"
        check_settings(settings, _FIXED_SETTINGS, where=where, source=source)
        names = settings.keys() & FuyuImageProcessor.__dataclass_fields__
        image_processor = FuyuImageProcessor(**{name: settings[name] for name in names})
        side = self.get_hf_config().patch_size
        found = {"patch_size": dict(image_processor.patch_size)}
        check_settings(found, {"patch_size": {"height": side, "width": side}}, where=where)
        self.check_token(IMAGE_TOKEN)
        return ProcessorOfParts(tokenizer=self.get_tokenizer(), image_processor=image_processor)

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger of the checkpoint's size and the operator's, by side."""
        own: FuyuImageProcessor = self.get_image_processor()
        sizes = (own.size, own.with_kwargs(self.scope_kwargs({})).size)
        return {"size": {side: max(size[side] for size in sizes) for side in ("height", "width")}}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs())
        planned: FuyuImageProcessor = self.get_image_processor().with_kwargs(kwargs)
        size = ImageSize(**planned.size)
        return size, math.prod(planned.get_grid(size))

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        grids = outputs.get("image_grid_hw", np.empty((0, 2), np.int64))
        return item_fields(
            "image", units=["image_patches"], counts=grids.prod(-1), on_host=["image_grid_hw"]
        )

    def get_target(self, modality: str) -> Target:
        return [self.get_token_id(START_TOKEN)]

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(tensors["image_grid_hw"].tolist())

    def write_item(self, modality: str, size: tuple[int, int]) -> list[int]:
        (rows, columns), get_id = size, self.get_token_id
        row = [*[get_id(IMAGE_TOKEN)] * columns, get_id(NEWLINE_TOKEN)]
        return [*row * rows, get_id(START_TOKEN)]

    def frame_prompt(
        self, token_ids: list[int], mm_counts: Mapping[str, int], mm_kwargs: Mapping[str, object]
    ) -> list[int]:
        """Add BOS and the answer token around a prompt with an image, as HF does."""
        if not mm_counts.get("image"):
            return token_ids
        tokenizer = self.get_tokenizer()
        start, answer = map(self.get_token_id, (START_TOKEN, ANSWER_TOKEN))
        # The tokenizer's BOS may differ from Fuyu's.
        has_bos = token_ids[:1] in ([start], [tokenizer.bos_token_id])
        words = token_ids[1:] if has_bos else token_ids
        if words[-1:] == [answer]:
            end = []
        elif not words or words[-1] in tokenizer.added_tokens_decoder:
            # Tokenized apart, so that it has its own leading space.
            end = tokenizer.encode(ANSWER_TOKEN, add_special_tokens=False)
        else:
            end = [answer]
        return [start, *words, *end]


FACTORIES = make_factories(FuyuProcessingInfo)
