"""Fuyu's processor: the image's rows of patches, then `<s>` and the text.

Before: `<s> what is it`. After: `(|SPEAKER|*columns |NEWLINE|)*rows <s> what is it <0x04>`; only
the `|SPEAKER|` take embeddings. A prompt without an image is unchanged.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from PIL import Image
from transformers import BatchFeature

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.registry import ProcessorFactories
from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.dummy_inputs import ImageDummyInputsBuilder
from mmjax.processing.hf_call import KnownKwargs
from mmjax.processing.image_processors.affine import make_affine
from mmjax.processing.image_processors.image import fit_within, patchify, to_pixels
from mmjax.processing.items.parse import ImageSize, ImagesOnlyDataParser, MultiModalDataItems
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.prompt_updates.matching import MultiModalPromptUpdatesApplyResult
from mmjax.processing.prompt_updates.updates import (
    MultiModalPromptUpdates,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.tensors.inputs import MultiModalKwargsItems

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

    def make_affine(self) -> np.ndarray:
        """Return what makes pixels of the patches' bytes."""
        return make_affine(
            rescale_factor=self.rescale_factor, mean=self.image_mean, std=self.image_std
        )


_FIXED_SETTINGS = dict.fromkeys(("do_resize", "do_pad", "do_rescale", "do_normalize"), True)
_IMAGE_SETTINGS = frozenset(one.name for one in fields(FuyuImageProcessor))


@dataclass(frozen=True, slots=True)
class FuyuProcessor:
    """Called like HF's processors: returns the unchanged text's ids, and the images' patches."""

    image_processor: FuyuImageProcessor
    tokenizer: Any

    @property
    def known_kwargs(self) -> KnownKwargs:
        return {"images_kwargs": _IMAGE_SETTINGS}

    def split_kwargs(self, kwargs: Mapping[str, Any]) -> tuple[FuyuImageProcessor, dict[str, Any]]:
        """Return the image processor with `kwargs`, and the tokenizer's kwargs."""
        for_images = {key: value for key, value in kwargs.items() if key in _IMAGE_SETTINGS}
        for_images |= kwargs.get("images_kwargs", {})
        expected = self.image_processor.patch_size
        if for_images.get("patch_size", expected) != expected:
            raise RequestValueError(
                f"`patch_size` in mm_processor_kwargs must be the model's, {expected}; "
                "leave it out",
                param="mm_processor_kwargs",
            )
        taken = {*_IMAGE_SETTINGS, "images_kwargs", "text_kwargs"}
        for_text = {key: value for key, value in kwargs.items() if key not in taken}
        return replace(self.image_processor, **for_images), for_text | kwargs.get("text_kwargs", {})

    def __call__(
        self, *, text: str, return_tensors: str, images: Sequence[Any] = (), **kwargs: Any
    ) -> BatchFeature:
        image_processor, for_text = self.split_kwargs(kwargs)
        outputs: dict[str, Any] = dict(self.tokenizer([text], **for_text))
        if images:
            sizes = [ImageSize(*image.size) for image in images]
            outputs["image_grid_hw"] = np.array([*map(image_processor.get_grid, sizes)], np.int64)
            outputs["image_patches"] = np.concatenate([*map(image_processor.make_patches, images)])
            outputs["image_affine"] = image_processor.make_affine()
        return BatchFeature(outputs, tensor_type=return_tensors)


class FuyuProcessingInfo(BaseProcessingInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImagesOnlyDataParser

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1}

    def get_reserved_tokens(self) -> Mapping[str, int]:
        return {IMAGE_TOKEN: self.get_token_id(IMAGE_TOKEN)}

    def get_token_id(self, token: str) -> int:
        tokenizer = self.get_tokenizer()
        token_id = tokenizer.convert_tokens_to_ids(token)
        if token_id in (None, tokenizer.unk_token_id):
            raise CheckpointError(f"the tokenizer lacks `{token}`, which Fuyu's prompts need")
        return token_id

    def load_hf_processor(self) -> FuyuProcessor:
        """Return mmjax's own: HF's processor needs torch."""
        # Imported here: it imports torch if it is installed.
        from transformers.image_processing_base import ImageProcessingMixin

        settings, _ = ImageProcessingMixin.get_image_processor_dict(self.ctx.model_config.path)
        for name, value in (*_FIXED_SETTINGS.items(), ("padding_mode", "constant")):
            if settings.get(name, value) != value:
                raise CheckpointError(
                    f"`{name}` of the image processor is {settings[name]!r}; it must be {value!r}"
                )
        image_processor = FuyuImageProcessor(
            **{key: value for key, value in settings.items() if key in _IMAGE_SETTINGS}
        )
        hf_config = self.get_hf_config()
        side = hf_config.patch_size
        if dict(image_processor.patch_size) != {"height": side, "width": side}:
            raise CheckpointError(
                f"`patch_size` of the image processor is {image_processor.patch_size}, but "
                f"config.json has {side}; make them equal"
            )
        if self.get_token_id(IMAGE_TOKEN) != hf_config.image_token_id:
            raise CheckpointError(
                f"`{IMAGE_TOKEN}` is token {self.get_token_id(IMAGE_TOKEN)}, but "
                f"`image_token_id` of config.json is {hf_config.image_token_id}"
            )
        return FuyuProcessor(image_processor, self.get_tokenizer())

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger of the checkpoint's size and the operator's, by side."""
        own: FuyuProcessor = self.get_hf_processor()
        operators, _ = own.split_kwargs(self.ctx.merge_mm_kwargs({}))
        sizes = (own.image_processor.size, operators.size)
        return {"size": {side: max(size[side] for size in sizes) for side in ("height", "width")}}

    def get_planned_image_processor(self) -> FuyuImageProcessor:
        """Return the image processor that memory is planned for."""
        kwargs = self.ctx.merge_mm_kwargs(self.get_planned_mm_kwargs())
        image_processor, _ = self.get_hf_processor().split_kwargs(kwargs)
        return image_processor

    def get_image_size_with_most_features(self) -> ImageSize:
        return ImageSize(**self.get_planned_image_processor().size)

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        grid = self.get_planned_image_processor().get_grid(self.get_image_size_with_most_features())
        return {"image": math.prod(grid)}


class FuyuDummyInputsBuilder(ImageDummyInputsBuilder[FuyuProcessingInfo]):
    def get_largest_image(self) -> ImageSize:
        return self.info.get_image_size_with_most_features()


class FuyuMultiModalProcessor(BaseMultiModalProcessor[FuyuProcessingInfo]):
    def _hf_processor_applies_updates(self, *args: object, **kwargs: object) -> bool:
        return False

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        grids = hf_inputs.get("image_grid_hw", np.empty((0, 2), np.int64))
        return {
            "image_patches": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "image_grid_hw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        get_id = self.info.get_token_id
        image, newline, start = get_id(IMAGE_TOKEN), get_id(NEWLINE_TOKEN), get_id(START_TOKEN)

        def get_replacement(item_idx: int) -> PromptUpdateDetails:
            item = out_mm_kwargs.get_item("image", item_idx)
            rows, columns = item["image_grid_hw"].data.tolist()
            full = [*[image] * columns, newline] * rows + [start]
            return PromptUpdateDetails.select_token_id(full, image)

        return [PromptReplacement("image", [start], get_replacement)]

    def _apply_token_matches(
        self, prompt: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> tuple[list[int], MultiModalPromptUpdatesApplyResult]:
        """Add BOS and the answer token, as HF does with an image, then insert the image's rows."""
        tokenizer = self.info.get_tokenizer()
        start, answer = map(self.info.get_token_id, (START_TOKEN, ANSWER_TOKEN))
        # The tokenizer's BOS may differ from Fuyu's.
        words = prompt[1:] if prompt[:1] in ([start], [tokenizer.bos_token_id]) else prompt
        if words[-1:] == [answer]:
            end = []
        elif not words or words[-1] in tokenizer.added_tokens_decoder:
            # Tokenized apart, so that it has its own leading space.
            end = tokenizer.encode(ANSWER_TOKEN, add_special_tokens=False)
        else:
            end = [answer]
        return super()._apply_token_matches([start, *words, *end], mm_prompt_updates)


FACTORIES = ProcessorFactories(
    info=FuyuProcessingInfo,
    dummy_inputs=FuyuDummyInputsBuilder,
    processor=FuyuMultiModalProcessor,
)
