"""DeepSeek-VL2's processor: each `<image>` becomes one id for each of the image's embeddings.

Before: `look <image> please`. After: `look <image>*n please`; all of them take embeddings, those
of rows' ends and of the separator too. Up to two images of a prompt are cut into tiles; more are
one tile each, beside the view that every image has.

Images -> a view of the whole, and square tiles in the arrangement that wastes least.

What the published processor computes, which needs torch; in numpy and Pillow.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageOps

from mmjax.errors import CheckpointError, RequestValueError, check_settings
from mmjax.models.deepseek_vl2.host_inputs import (
    DeepseekVLV2HostInputs,
    count_image_tokens,
    count_side_tokens,
    read_part,
)
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.models.tiles import FewCutProcessor
from mmjax.processing.answers import DEEPSEEK
from mmjax.processing.chat_turns import write_turns
from mmjax.processing.context import InputProcessingContext
from mmjax.processing.image_processors.affine import make_affine
from mmjax.processing.image_processors.image import sliver_error, to_pixels
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.image_processors.tiling import choose_resolution
from mmjax.processing.items.items import ImageSize
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_LEFT_OUT: Mapping[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "normalize": True,
}
"""What a key of processor_config.json means where it is left out."""


class DeepseekVLV2ImageProcessor:
    """The image part of the published processor, by processor_config.json's settings."""

    valid_kwargs = frozenset({"cropping"})

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        tile_size: int,
        candidate_resolutions: Sequence[Sequence[int]],
    ) -> None:
        """`candidate_resolutions`: (width, height) of the canvases that are cut into tiles."""
        self.tile_size = tile_size
        self.candidates = [ImageSize(width=w, height=h) for w, h in candidate_resolutions]
        uneven = [
            size for size in self.candidates if size.width % tile_size or size.height % tile_size
        ]
        if uneven or not self.candidates:
            raise CheckpointError(
                f"`candidate_resolutions` is {[list(size) for size in self.candidates]}; sides "
                f"must be multiples of the vision tower's `image_size`, {tile_size}"
            )
        values = {key: settings.get(key, value) for key, value in _LEFT_OUT.items()}
        if not values["normalize"]:
            raise CheckpointError("`normalize` of processor_config.json is false; it must be true")
        mean, std = values["image_mean"], values["image_std"]
        self.affine = make_affine(rescale_factor=1 / 255, mean=mean, std=std)
        self._background = tuple(int(channel * 255) for channel in mean)

    def __call__(
        self, images: Sequence[Image.Image], *, return_tensors: str, cropping: Any = None
    ) -> dict[str, np.ndarray]:
        """Return `pixel_values` uint8[tiles, 3, S, S], `images_spatial_crop` int64[images, 2].

        The latter is how many tiles stand side by side, and one above the other. `cropping` false:
        each image is one tile beside its view.
        """
        arranged = [
            self.arrange(ImageSize(*image.size), {"cropping": cropping}) for image in images
        ]
        tiles = [
            tile
            for image, canvas in zip(images, arranged, strict=True)
            for tile in self._cut(image.convert("RGB"), canvas)
        ]
        counts = [[side // self.tile_size for side in canvas] for canvas in arranged]
        return {
            "pixel_values": np.stack([to_pixels(tile) for tile in tiles]),
            "image_affine": self.affine,
            "images_spatial_crop": np.array(counts, np.int64),
        }

    def has_tiles(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether images are cut into several tiles under an HF call's kwargs."""
        cropping = kwargs.get("cropping")
        if cropping is not None and not isinstance(cropping, bool):
            raise RequestValueError(
                f"`cropping` is {cropping!r}; it must be true or false", param="mm_processor_kwargs"
            )
        return cropping is not False

    def list_canvases(self, kwargs: Mapping[str, Any]) -> Sequence[ImageSize]:
        """Return the sizes in pixels of which an image's tiles may be."""
        side = self.tile_size
        return self.candidates if self.has_tiles(kwargs) else [ImageSize(width=side, height=side)]

    def arrange(self, size: ImageSize, kwargs: Mapping[str, Any]) -> ImageSize:
        """Return the size of the canvas for an image; refuse one of which nothing would be left."""
        canvas = choose_resolution(size, self.list_canvases(kwargs))
        if round(min(size) / max(size) * self.tile_size) < 1:
            raise sliver_error(size, self.tile_size)
        return canvas

    def _cut(self, image: Image.Image, canvas: ImageSize) -> list[Image.Image]:
        side = self.tile_size
        padded = self._pad(image, canvas)
        tiles = [
            padded.crop((x, y, x + side, y + side))
            for y in range(0, canvas.height, side)
            for x in range(0, canvas.width, side)
        ]
        return [self._pad(image, ImageSize(width=side, height=side)), *tiles]

    def _pad(self, image: Image.Image, size: ImageSize) -> Image.Image:
        """Scale an image to fit, and put it in the middle of a canvas of the mean's colour."""
        method = Image.Resampling.BICUBIC
        canvas = (size.width, size.height)
        return ImageOps.pad(image, canvas, method=method, color=self._background)


MAX_CROPPED_IMAGES = 2
"""Images of a prompt up to which they are cut into tiles, as the model was trained."""

CHAT_TEMPLATE = write_turns(
    start="{'user': '<|User|>: ', 'assistant': '<|Assistant|>:'}[message.role]",
    content="message.content | trim",
    end=r"eos_token if message.role == 'assistant' else '\n\n'",
    answer="'<|Assistant|>:'",
)
"""The published format `deepseek`, for which checkpoints have no template. An answer follows its
colon at once: the published code makes ids of each message by itself, and none of a space there."""


class DeepseekVLV2ProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = DeepseekVLV2HostInputs
    answer_form = DEEPSEEK
    placeholders: ClassVar = {"image": "<image>"}

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        # The published processor begins every prompt with BOS. transformers drops `add_bos_token`
        # of a byte-level tokenizer whose class is said to be Llama's.
        if getattr(ctx.tokenizer, "add_bos_token", None) is False:
            ctx.tokenizer.add_bos_token = True

    def check_sizes(self, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]) -> None:
        """Do nothing: an image becomes one of few canvases, whatever a request says."""

    @cached_property
    def image_token_id(self) -> int:
        """The id of `<image>`, which processor_config.json may name otherwise."""
        return self.get_token_id(self.processor_settings.get("image_token", "<image>"))

    def get_embed_token_id(self, modality: str) -> int:
        return self.image_token_id

    def load_hf_processor(self) -> ProcessorOfParts:
        """Put together what the published code would, which needs torch."""
        hf_config = self.get_hf_config()
        vision = read_part(hf_config, "vision_config")
        facts = {
            "candidate_resolutions": hf_config.candidate_resolutions,
            "downsample_ratio": read_part(hf_config, "projector_config")["downsample_ratio"],
            "patch_size": vision["patch_size"],
        }
        check_settings(self.processor_settings, facts)
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=DeepseekVLV2ImageProcessor(
                self.processor_settings,
                tile_size=vision["image_size"],
                candidate_resolutions=facts["candidate_resolutions"],
            ),
        )

    def count_tokens(self, canvas: ImageSize) -> int:
        """Return the embeddings of an image whose tiles fill a canvas of a size in pixels."""
        columns, rows = (side // self.get_image_processor().tile_size for side in canvas)
        return count_image_tokens(count_side_tokens(self.get_hf_config()), columns, rows)

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return tiles."""
        return {"cropping": True}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs())
        largest = max(self.get_image_processor().list_canvases(kwargs), key=self.count_tokens)
        return largest, self.count_tokens(largest)

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Demand the rows of one of the arrangements, those between tiles included."""
        canvases = self.get_image_processor().list_canvases({})
        known = sorted({self.count_tokens(canvas) for canvas in canvases})
        hint = f"{', '.join(map(str, known))}, with the ends of rows and the separator"
        self.check_rows(modality, num_embeds, known, hint)

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        crops = outputs.get("images_spatial_crop")
        counts = () if crops is None else 1 + crops.prod(axis=1)
        return item_fields(
            "image", units=["pixel_values"], counts=counts, on_host=["images_spatial_crop"]
        )

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        columns, rows = tensors["images_spatial_crop"].tolist()
        return count_image_tokens(count_side_tokens(self.get_hf_config()), columns, rows)


class DeepseekVLV2MultiModalProcessor(FewCutProcessor[DeepseekVLV2ProcessingInfo]):
    max_cut_images = MAX_CROPPED_IMAGES


FACTORIES = make_factories(DeepseekVLV2ProcessingInfo, DeepseekVLV2MultiModalProcessor)
