r"""DeepSeek-OCR 2's prompt side: each `<image>` becomes one id for each embedding of an image.

Before: `<image>\nFree OCR.`. After: `<image>*n \nFree OCR.`: 144 a tile, 256, and the separator.

DeepSeek-OCR 2's boxes, of `<|ref|>title<|/ref|><|det|>[[81, 77, 916, 109]]<|/det|>`, in pixels.

The four numbers of a box are its left, upper, right and lower edge in parts of 999 of a side.

Images -> a view of the whole and tiles, by HF's DeepSeek-OCR 2 image processor for Pillow.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import check_settings
from mmjax.models.deepseek_ocr2.host_inputs import (
    MAX_TILES,
    STRIDE,
    TILE_TOKENS,
    DeepseekOcr2HostInputs,
    Sides,
    count_tokens,
    read_sides,
)
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.processing.context import InputProcessingContext
from mmjax.processing.image_processors.image import sliver_error
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.image_processors.pil_classes import load_class, load_image_processor
from mmjax.processing.image_processors.tiling import check_limits, list_arrangements
from mmjax.processing.items.items import ImageSize
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_LIMITS = {"min_patches": 2, "max_patches": MAX_TILES}
"""Of a call that says nothing: HF's `DeepseekOcr2Processor.images_kwargs`."""


class ViewAndTiles:
    """HF's image processor, held to the sizes that the model was trained with."""

    valid_kwargs: ClassVar = frozenset({"min_patches", "max_patches"})

    def __init__(self, hf: Any, sides: Sides) -> None:
        """`hf`: a `DeepseekOcr2ImageProcessorPil` whose pixels stay bytes."""
        self.hf, self.sides = hf, sides
        size = {"height": sides.view, "width": sides.view}
        wanted = {"size": size, "tile_size": sides.tile, "crop_to_patches": True}
        found = {
            "size": {"height": hf.size.height, "width": hf.size.width},
            "tile_size": hf.tile_size,
            "crop_to_patches": hf.crop_to_patches,
        }
        check_settings(found, wanted, where="the image processor", source="the model takes")

    def __call__(
        self, images: Sequence[Any], *, return_tensors: str = "np", **kwargs: Any
    ) -> dict[str, Any]:
        """Return the view of each image and the tiles of all.

        Returns:
            `pixel_values` uint8[images, 3, S, S], `pixel_values_local` uint8[tiles, 3, Z, Z],
            `num_local_patches` int64[images] and `image_affine`.
        """
        fewest, most = self.get_limits(kwargs)
        for size in (ImageSize(*image.size) for image in images):
            if round(min(size) / max(size) * self.sides.view) < 1:
                raise sliver_error(size, self.sides.view)
        outputs = self.hf(list(images), min_patches=fewest, max_patches=most)
        tiles = outputs.get("pixel_values_local")
        none = np.empty((0, 3, self.sides.tile, self.sides.tile), np.uint8)
        return {
            "pixel_values": np.stack(outputs["pixel_values"]),
            "pixel_values_local": none if tiles is None else np.stack(tiles),
            "num_local_patches": np.asarray(outputs["num_local_patches"], np.int64),
            "image_affine": outputs["image_affine"],
        }

    def get_limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the fewest and the most tiles that an image is cut into.

        What preprocessor_config.json says of them has no effect in HF either.
        """
        names = ("min_patches", "max_patches")
        fewest, most = (
            _LIMITS[name] if kwargs.get(name) is None else kwargs[name] for name in names
        )
        return check_limits(fewest, most, names, MAX_TILES)


_FOUND = re.compile(r"<\|ref\|>(.*?)<\|/ref\|>\s*<\|det\|>(.*?)<\|/det\|>", re.DOTALL)
_BOX = re.compile(r"\[\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*\]")
_PARTS = 999


def parse_boxes(text: str, image_size: ImageSize) -> dict[str, Any]:
    """Return `{"boxes": {"bboxes", "labels"}}`, of equal length; nothing where there are none.

    `bboxes`: edges in whole pixels of the image; `labels`: what `<|ref|>` says of each.
    """
    boxes, labels = [], []
    sides = (image_size.width, image_size.height) * 2
    for label, places in _FOUND.findall(text):
        for box in _BOX.findall(places):
            edges = zip(map(int, box), sides, strict=True)
            boxes.append([int(part / _PARTS * side) for part, side in edges])
            labels.append(label.strip())
    return {"boxes": {"bboxes": boxes, "labels": labels}} if boxes else {}


IMAGE = "<image>"
CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {{- message.content | trim -}}
{%- endfor -%}
"""
"""The published format `plain`: messages follow each other without any mark."""


class DeepseekOcr2ProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = {
        "Page to Markdown": "<|grounding|>Convert the document to markdown.",
        "Read text": "Free OCR.",
        "Text with places": "<|grounding|>OCR this image.",
        "Figure": "Parse the figure.",
        "Describe": "Describe this image in detail.",
        "Find a phrase": "Locate <|ref|>{the title}<|/ref|> in the image.",
    }
    host_inputs = DeepseekOcr2HostInputs
    placeholders: ClassVar = {"image": IMAGE}
    max_answer_images = 1

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        # DeepSeek's code begins every prompt with BOS, which transformers drops of a byte-level
        # tokenizer whose class is said to be Llama's.
        is_dropped = getattr(ctx.tokenizer, "add_bos_token", None) is False
        if self.is_original and is_dropped:
            ctx.tokenizer.add_bos_token = True

    @property
    def is_original(self) -> bool:
        """Whether the checkpoint is in DeepSeek's own layout, whose code has all settings."""
        return getattr(self.get_hf_config(), "is_original", False)

    def load_hf_processor(self) -> ProcessorOfParts:
        """Assemble the parts: HF's class writes what the row writes."""
        self.check_token(IMAGE)
        sides, sam = read_sides(self.get_hf_config()), self.get_hf_config().vision_config.sam_config
        facts = {"patch_size": sam.patch_size, "downsample_ratio": STRIDE}
        check_settings({} if self.is_original else self.processor_settings, facts)
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=ViewAndTiles(self._load_image_processor(sides), sides),
        )

    def _load_image_processor(self, sides: Sides) -> Any:
        path = self.ctx.model_config.path
        if not self.is_original:
            return load_image_processor(path, {"DeepseekOcr2": "deepseek_ocr2"})
        size = {"height": sides.view, "width": sides.view}
        return load_class("DeepseekOcr2", "deepseek_ocr2")(size=size, tile_size=sides.tile)

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Leave out tiles where no image has one, as HF's processor does."""
        has_tiles = len(tensors.get("pixel_values_local", ()))
        return {k: v for k, v in tensors.items() if has_tiles or k != "pixel_values_local"}

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger number of tiles of the checkpoint's and the operator's."""
        cutter: ViewAndTiles = self.get_image_processor()
        return {"max_patches": self.find_larger(lambda kwargs: cutter.get_limits(kwargs)[1])}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of an image with the most tiles, and how many embeddings it has."""
        cutter: ViewAndTiles = self.get_image_processor()
        limits = cutter.get_limits(self.scope_kwargs(self.get_planned_mm_kwargs()))
        columns, rows = list_arrangements(*limits)[-1]
        # An image of a tile's size is not cut.
        side = cutter.sides.tile + 1
        size = ImageSize(width=columns * side, height=rows * side)
        return size, count_tokens(columns * rows)

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Demand the rows of a view, the separator and whole tiles."""
        known = [count_tokens(number) for number in range(MAX_TILES + 1)]
        hint = f"{known[0]}, and {TILE_TOKENS} for each of up to {MAX_TILES} tiles"
        self.check_rows(modality, num_embeds, known, hint)

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return item_fields(
            "image",
            rows=["pixel_values"],
            units=["pixel_values_local"],
            counts=outputs.get("num_local_patches", ()),
            on_host=["num_local_patches"],
        )

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        return count_tokens(int(tensors["num_local_patches"]))

    def read_answer(self, text: str, image_sizes: Sequence[ImageSize]) -> Mapping[str, Any]:
        return parse_boxes(text, image_sizes[0])


FACTORIES = make_factories(DeepseekOcr2ProcessingInfo)
