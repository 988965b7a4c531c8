r"""The prompt side of DeepSeek's OCR models: `<image>` becomes an id for each embedding.

Before: `<image>\nFree OCR.`. After: `<image>*n \nFree OCR.`. Of DeepSeek-OCR 2, n is 144 a tile,
256, and the separator; of the others, what states and newlines there are (`count_tokens`).

Boxes, of `<|ref|>title<|/ref|><|det|>[[81, 77, 916, 109]]<|/det|>` or, Unlimited-OCR's, of
`<|det|>title [81, 77, 916, 109]<|/det|>`, in pixels. The four numbers of a box are its left, upper,
right and lower edge in parts of 999 of a side.

Images -> a view of the whole and tiles, by HF's DeepSeek-OCR 2 image processor for Pillow. What HF
has for Unlimited-OCR does the same by torchvision.
"""

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import CheckpointError, check_settings
from mmjax.models.deepseek_ocr2.host_inputs import (
    STRIDE,
    TILE_TOKENS,
    DeepseekOcr2HostInputs,
    DeepseekOcrHostInputs,
    Sides,
    UnlimitedOcrHostInputs,
    ViewHostInputs,
    count_tokens,
)
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.context import InputProcessingContext
from mmjax.processing.image_processors.image import check_bool, sliver_error
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_image_settings
from mmjax.processing.image_processors.pil_classes import (
    load_class,
    load_image_processor,
    make_image_processor,
)
from mmjax.processing.image_processors.tiling import check_limits, list_arrangements
from mmjax.processing.items.items import ImageSize
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_PIL = "transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2"


class ViewAndTiles:
    """HF's image processor, held to the sizes that the model was trained with."""

    limit_names: ClassVar = ("min_patches", "max_patches")
    valid_kwargs: frozenset[str] = frozenset(limit_names)

    def __init__(self, hf: Any, sides: Sides, max_tiles: int) -> None:
        """`hf`: a `DeepseekOcr2ImageProcessorPil` whose pixels stay bytes."""
        self.hf, self.sides, self.max_tiles = hf, sides, max_tiles
        self.defaults: Mapping[str, Any] = {"min_patches": 2, "max_patches": max_tiles}
        """Of a call that says nothing: HF's `DeepseekOcr2Processor.images_kwargs`, whatever
        preprocessor_config.json says."""
        wanted = {
            "size": {"height": sides.view, "width": sides.view},
            "tile_size": sides.tile,
            **self.list_fixed(),
        }
        found = {
            "size": {"height": hf.size.height, "width": hf.size.width},
            "tile_size": hf.tile_size,
            "crop_to_patches": hf.crop_to_patches,
        }
        check_settings(found, wanted, where="the image processor", source="the model takes")

    def list_fixed(self) -> Mapping[str, Any]:
        """Return what the file may not say otherwise, beside sizes."""
        return {"crop_to_patches": True}

    def __call__(
        self, images: Sequence[Any], *, return_tensors: str = "np", **kwargs: Any
    ) -> dict[str, Any]:
        """Return the view of each image and the tiles of all.

        Returns:
            `pixel_values` uint8[images, 3, S, S], `pixel_values_local` uint8[tiles, 3, Z, Z],
            `num_local_patches` int64[images] and `image_affine`.
        """
        limits = self.get_limits(kwargs)
        for size in (ImageSize(*image.size) for image in images):
            if round(min(size) / max(size) * self.sides.view) < 1:
                raise sliver_error(size, self.sides.view)
        outputs = self.call_hf(images, limits)
        tiles = outputs.get("pixel_values_local")
        none = np.empty((0, 3, self.sides.tile, self.sides.tile), np.uint8)
        return {
            "pixel_values": np.stack(outputs["pixel_values"]),
            "pixel_values_local": none if tiles is None else np.stack(tiles),
            "num_local_patches": np.asarray(outputs["num_local_patches"], np.int64),
            "image_affine": outputs["image_affine"],
        }

    def call_hf(self, images: Sequence[Any], limits: tuple[int, int]) -> Mapping[str, Any]:
        """Return what HF's class makes of images."""
        return self.hf(list(images), **dict(zip(self.limit_names, limits, strict=True)))

    def get_limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the fewest and the most tiles that an image is cut into."""
        fewest, most = (
            self.defaults[name] if kwargs.get(name) is None else kwargs[name]
            for name in self.limit_names
        )
        return check_limits(fewest, most, self.limit_names, self.max_tiles)


class ViewAndGrid(ViewAndTiles):
    """The same as Unlimited-OCR's in HF, which may be told to cut no image."""

    valid_kwargs = frozenset({*ViewAndTiles.limit_names, "crop_to_patches"})

    def __init__(self, hf: Any, sides: Sides, max_tiles: int) -> None:
        super().__init__(hf, sides, max_tiles)
        names = (*self.limit_names, "crop_to_patches")
        self.defaults = {name: getattr(hf, name) for name in names}

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], sides: Sides, max_tiles: int
    ) -> "ViewAndGrid":
        """Return that of a preprocessor_config.json, of which what is left out is as in HF."""
        own = {"size": {"height": 1024, "width": 1024}, "tile_size": 640, "max_patches": max_tiles}
        padded = settings.get("maximum_pad_value", 640)
        if padded >= sides.view:
            raise CheckpointError(
                f"`maximum_pad_value` of preprocessor_config.json is {padded}; an image that is "
                f"not cut would be squeezed to {sides.view} x {sides.view} pixels, and mmjax pads "
                "it: the key must be smaller"
            )
        hf_class = load_class("DeepseekOcr2", "deepseek_ocr2")
        return cls(make_image_processor(hf_class, {**own, **settings}), sides, max_tiles)

    def list_fixed(self) -> Mapping[str, Any]:
        return {}

    def __call__(
        self, images: Sequence[Any], *, return_tensors: str = "np", **kwargs: Any
    ) -> dict[str, Any]:
        """Return the same, and `patches_grid` int64[images, 2]: columns and rows of tiles."""
        outputs = super().__call__(images, return_tensors=return_tensors, **kwargs)
        sizes, counts = [ImageSize(*image.size) for image in images], outputs["num_local_patches"]
        limits = self.get_limits(kwargs)
        grids = [
            self.arrange(size, limits) if count else (1, 1)
            for size, count in zip(sizes, counts, strict=True)
        ]
        return {**outputs, "patches_grid": np.asarray(grids, np.int64).reshape(-1, 2)}

    def call_hf(self, images: Sequence[Any], limits: tuple[int, int]) -> Mapping[str, Any]:
        if limits != (0, 0):
            return super().call_hf(images, limits)
        # HF's class of DeepSeek-OCR 2 makes a view as large as a tile, then. One by one: those of a
        # batch that is only resized are resized alike (`keep_bytes`), and here each has its size.
        options = {"crop_to_patches": False, "tile_size": self.sides.view}
        each = [self.hf([image], **options) for image in images]
        views = [outputs["pixel_values"][0] for outputs in each]
        return {**each[0], "pixel_values": views, "num_local_patches": [0] * len(views)}

    def get_limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the fewest and the most tiles of an image that is cut; zeros where none is."""
        limits = super().get_limits(kwargs)
        is_cut = kwargs.get("crop_to_patches")
        is_cut = self.defaults["crop_to_patches"] if is_cut is None else is_cut
        return limits if check_bool("crop_to_patches", is_cut) else (0, 0)

    def arrange(self, size: ImageSize, limits: tuple[int, int]) -> tuple[int, int]:
        """Return the columns and rows of an image's tiles."""
        sides = (self.sides.tile, self.sides.tile)
        choose = import_module(_PIL).get_optimal_tiled_canvas
        return choose((size.height, size.width), sides, *limits)


_FOUND = re.compile(r"<\|ref\|>(.*?)<\|/ref\|>\s*<\|det\|>(.*?)<\|/det\|>", re.DOTALL)
_BOX = re.compile(r"\[\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*\]")
_NUMBERS = r"\[(\d{1,3}), (\d{1,3}), (\d{1,3}), (\d{1,3})\]"
_REGION = re.compile(rf"<\|det\|>(\S+) {_NUMBERS}<\|/det\|>")
_PARTS = 999


def parse_boxes(text: str, image_size: ImageSize) -> dict[str, Any]:
    """Return `{"boxes": {"bboxes", "labels"}}`, of equal length; nothing where there are none.

    `bboxes`: edges in whole pixels of the image; `labels`: what `<|ref|>` says of each.
    """
    found = [
        (label.strip(), box)
        for label, places in _FOUND.findall(text)
        for box in _BOX.findall(places)
    ]
    return _in_pixels(found, image_size)


def parse_regions(text: str, image_size: ImageSize) -> dict[str, Any]:
    """Return the same of Unlimited-OCR's regions, whose kinds are the labels."""
    return _in_pixels([(kind, box) for kind, *box in _REGION.findall(text)], image_size)


def _in_pixels(found: Sequence[tuple[str, Sequence[str]]], image_size: ImageSize) -> dict[str, Any]:
    sides = (image_size.width, image_size.height) * 2
    boxes = [
        [int(part / _PARTS * side) for part, side in zip(map(int, box), sides, strict=True)]
        for _, box in found
    ]
    labels = [label for label, _ in found]
    return {"boxes": {"bboxes": boxes, "labels": labels}} if boxes else {}


IMAGE = "<image>"
CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {{- message.content | trim -}}
{%- endfor -%}
"""
"""The published format `plain`: messages follow each other without any mark."""
TASKS = {
    "Page to Markdown": "<|grounding|>Convert the document to markdown.",
    "Read text": "Free OCR.",
    "Text with places": "<|grounding|>OCR this image.",
    "Figure": "Parse the figure.",
    "Describe": "Describe this image in detail.",
    "Find a phrase": "Locate <|ref|>{the title}<|/ref|> in the image.",
}
"""DeepSeek's."""


class ViewInfo(FamilyInfo):
    """What the three have in common."""

    chat_template = CHAT_TEMPLATE
    placeholders: ClassVar = {"image": IMAGE}
    max_answer_images = 1

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        # The published code begins every prompt with BOS, which transformers drops of a byte-level
        # tokenizer whose class is said to be Llama's.
        is_dropped = getattr(ctx.tokenizer, "add_bos_token", None) is False
        if self.is_original and is_dropped:
            ctx.tokenizer.add_bos_token = True

    @property
    def is_original(self) -> bool:
        """Whether the checkpoint is in its authors' own layout, whose code has all settings."""
        return getattr(self.get_hf_config(), "is_original", False)

    def load_hf_processor(self) -> ProcessorOfParts:
        """Assemble the parts: HF's class writes what the row writes."""
        self.check_token(IMAGE)
        sam = self.get_hf_config().vision_config.sam_config
        facts = {"patch_size": sam.patch_size, "downsample_ratio": STRIDE}
        check_settings({} if self.is_original else self.processor_settings, facts)
        found = self._own_host_inputs
        assert isinstance(found, ViewHostInputs), f"{found=}"
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=self.load_tiles(found.sides, found.max_tiles),
        )

    def load_tiles(self, sides: Sides, max_tiles: int) -> ViewAndTiles:
        """Return the part for images."""
        raise NotImplementedError

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Leave out tiles where no image has one, as HF's processor does, and keep their counts."""
        given = {k: v for k, v in tensors.items() if k != "pixel_values_local" or len(v)}
        counts = given.get("num_local_patches", ())
        return {**given, "num_local_patches": tuple(map(int, counts))} if len(counts) else given

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return item_fields(
            "image",
            rows=["pixel_values"],
            units=["pixel_values_local"],
            counts=outputs.get("num_local_patches", ()),
            on_host=["num_local_patches"],
        )


class DeepseekOcr2ProcessingInfo(ViewInfo):
    tasks: ClassVar = TASKS
    host_inputs = DeepseekOcr2HostInputs

    def load_tiles(self, sides: Sides, max_tiles: int) -> ViewAndTiles:
        path = self.ctx.model_config.path
        if not self.is_original:
            hf = load_image_processor(path, {"DeepseekOcr2": "deepseek_ocr2"})
            return ViewAndTiles(hf, sides, max_tiles)
        size = {"height": sides.view, "width": sides.view}
        hf_class = load_class("DeepseekOcr2", "deepseek_ocr2")
        return ViewAndTiles(hf_class(size=size, tile_size=sides.tile), sides, max_tiles)

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
        most = DeepseekOcr2HostInputs.max_tiles
        known = [count_tokens(number) for number in range(most + 1)]
        hint = f"{known[0]}, and {TILE_TOKENS} for each of up to {most} tiles"
        self.check_rows(modality, num_embeds, known, hint)

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        return count_tokens(int(tensors["num_local_patches"]))

    def read_answer(self, text: str, image_sizes: Sequence[ImageSize]) -> Mapping[str, Any]:
        return parse_boxes(text, image_sizes[0])


class UnlimitedOcrProcessingInfo(ViewInfo):
    chat_template = write_turns(
        start="''", content=write_parts("part.text | trim", image=IMAGE), answer="''"
    )
    tasks: ClassVar = {"Page": "document parsing.", "Pages": "Multi page parsing."}
    host_inputs = UnlimitedOcrHostInputs
    image_class: ClassVar = "UnlimitedOcrImageProcessor"

    @property
    def _lines(self) -> UnlimitedOcrHostInputs:
        found = self._own_host_inputs
        assert isinstance(found, UnlimitedOcrHostInputs), f"{found=}"
        return found

    def load_tiles(self, sides: Sides, max_tiles: int) -> ViewAndGrid:
        if self.is_original:
            size = {"height": sides.view, "width": sides.view}
            settings: Mapping[str, Any] = {"size": size, "tile_size": sides.tile}
            return ViewAndGrid.from_settings(
                {**settings, "maximum_pad_value": sides.tile}, sides, max_tiles
            )
        settings = load_image_settings(self.ctx.model_config.path)
        found = settings.get("image_processor_type") or self.image_class
        known = {"image_processor_type": self.image_class}
        found = {"image_processor_type": found.removesuffix("Fast")}
        check_settings(found, known, where="preprocessor_config.json", source="mmjax knows")
        return ViewAndGrid.from_settings(settings, sides, max_tiles)

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger number of tiles of the checkpoint's and the operator's."""
        cutter: ViewAndGrid = self.get_image_processor()

        def read(kwargs: Mapping[str, Any]) -> int:
            return cutter.get_limits({**kwargs, "crop_to_patches": True})[1]

        return {"crop_to_patches": True, "max_patches": self.find_larger(read)}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of an image with the most lines of tiles, and how many embeddings."""
        cutter: ViewAndGrid = self.get_image_processor()
        _, most = cutter.get_limits(self.scope_kwargs(self.get_planned_mm_kwargs()))
        if not most:
            return ImageSize(
                width=cutter.sides.view, height=cutter.sides.view
            ), self._lines.count_tokens(0, 0)
        # One above the other: behind each line of a tile is a newline. One of a tile's size is not
        # cut.
        side = cutter.sides.tile + 1
        return ImageSize(width=side, height=most * side), self._lines.count_tokens(1, most)

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Demand the rows of a view, of a grid of tiles, newlines and the separator."""
        count, most = self._lines.count_tokens, self._lines.max_tiles
        known = {count(*grid) for grid in [(0, 0), *list_arrangements(1, most)]}
        hint = (
            f"{count(0, 0)} of its view with newlines and a separator, and those of a grid of up "
            f"to {most} tiles with a newline behind each line: {count(1, most)} at most"
        )
        self.check_rows(modality, num_embeds, sorted(known), hint)

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        grid = item_fields("image", on_host=["patches_grid"])
        return {**super().get_fields(outputs), **grid}

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        has_tiles = int(tensors["num_local_patches"]) > 0
        grid = tensors["patches_grid"].tolist() if has_tiles else (0, 0)
        return self._lines.count_tokens(*grid)

    def read_answer(self, text: str, image_sizes: Sequence[ImageSize]) -> Mapping[str, Any]:
        return parse_regions(text, image_sizes[0])


class DeepseekOcrProcessingInfo(UnlimitedOcrProcessingInfo):
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = TASKS
    host_inputs = DeepseekOcrHostInputs

    def read_answer(self, text: str, image_sizes: Sequence[ImageSize]) -> Mapping[str, Any]:
        return parse_boxes(text, image_sizes[0])


FACTORIES = make_factories(DeepseekOcr2ProcessingInfo)
DEEPSEEK_OCR_FACTORIES = make_factories(DeepseekOcrProcessingInfo)
UNLIMITED_FACTORIES = make_factories(UnlimitedOcrProcessingInfo)
