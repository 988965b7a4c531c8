r"""The prompt side of DeepSeek's OCR models: `<image>` becomes an id for each embedding.

Before: `<image>\nFree OCR.`. After: `<image>*n \nFree OCR.`. Of DeepSeek-OCR 2, n is 144 a tile,
256, and the separator; of the others, what states and newlines there are (`count_tokens`).

Images -> a view of the whole and tiles, by HF's DeepSeek-OCR 2 image processor for Pillow. What HF
has for Unlimited-OCR does the same by torchvision.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
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
)
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.processing.answers import DEEPSEEK_OCR
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.context import InputProcessingContext
from mmjax.processing.image_processors.image import check_bool, sliver_error
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_image_settings
from mmjax.processing.image_processors.pil_classes import load_class, make_image_processor
from mmjax.processing.image_processors.tiling import check_limits, list_arrangements
from mmjax.processing.items.items import ImageSize
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_LIMITS, _SWITCH = ("min_patches", "max_patches"), "crop_to_patches"


class ViewAndTiles:
    """HF's image processor, held to the sizes that the model was trained with."""

    def __init__(self, hf: Any, views: ViewHostInputs, *, may_be_uncut: bool) -> None:
        """`hf`: a `DeepseekOcr2ImageProcessorPil` whose pixels stay bytes."""
        self.hf, self.sides, self.max_tiles = hf, views.sides, views.max_tiles
        self.defaults = {name: getattr(hf, name) for name in (*_LIMITS, _SWITCH)}
        self.valid_kwargs = frozenset(self.defaults if may_be_uncut else _LIMITS)
        found = {
            "size": {"height": hf.size.height, "width": hf.size.width},
            "tile_size": hf.tile_size,
            _SWITCH: may_be_uncut or hf.crop_to_patches,
        }
        wanted = {**self.sides.settings, _SWITCH: True}
        check_settings(found, wanted, where="the image processor", source="the model takes")

    def __call__(
        self, images: Sequence[Any], *, return_tensors: str = "np", **kwargs: Any
    ) -> dict[str, Any]:
        """Return the view of each image and the tiles of all.

        Returns:
            `pixel_values` uint8[images, 3, S, S], `pixel_values_local` uint8[tiles, 3, Z, Z],
            `num_local_patches` int64[images], `patches_grid` int64[images, 2], columns and rows of
            tiles, and `image_affine`.
        """
        limits, tile = self.get_limits(kwargs), self.sides.tile
        sizes = [ImageSize(*image.size) for image in images]
        for size in sizes:
            if round(min(size) / max(size) * self.sides.view) < 1:
                raise sliver_error(size, self.sides.view)
        outputs = self._call_hf(images, limits)
        tiles, counts = outputs.get("pixel_values_local"), outputs["num_local_patches"]
        choose = import_module(self.hf.hf_class.__module__).get_optimal_tiled_canvas
        grids = [
            choose((size.height, size.width), (tile, tile), *limits) if count else (1, 1)
            for size, count in zip(sizes, counts, strict=True)
        ]
        none = np.empty((0, 3, tile, tile), np.uint8)
        return {
            "pixel_values": np.stack(outputs["pixel_values"]),
            "pixel_values_local": none if tiles is None else np.stack(tiles),
            "num_local_patches": np.asarray(counts, np.int64),
            "patches_grid": np.asarray(grids, np.int64),
            "image_affine": outputs["image_affine"],
        }

    def _call_hf(self, images: Sequence[Any], limits: tuple[int, int]) -> Mapping[str, Any]:
        if any(limits):
            options = dict(zip(_LIMITS, limits, strict=True))
            return self.hf(list(images), **options, crop_to_patches=True)
        # A view is as large as a tile, then. One by one: those of a batch that is only resized are
        # resized alike (`keep_bytes`), and here each has its size.
        side = self.sides.view
        each = [self.hf([image], tile_size=side, crop_to_patches=False) for image in images]
        views = [outputs["pixel_values"][0] for outputs in each]
        return {**each[0], "pixel_values": views, "num_local_patches": [0] * len(views)}

    def get_limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the fewest and the most tiles of an image that is cut; zeros where none is."""
        given = {name: value for name, value in kwargs.items() if value is not None}
        values = {**self.defaults, **given}
        fewest, most, is_cut = (values[name] for name in self.defaults)
        limits = check_limits(fewest, most, _LIMITS, self.max_tiles)
        return limits if check_bool(_SWITCH, is_cut) else (0, 0)


IMAGE = "<image>"
CHAT_TEMPLATE = write_turns(start="''", content="message.content | trim", answer="''")
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
    """What the three have in common, of which most is DeepSeek's."""

    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = TASKS
    placeholders: ClassVar = {"image": IMAGE}
    answer_form = DEEPSEEK_OCR
    host_tensors: ClassVar[Sequence[str]]
    """What only the host reads of an image."""
    rows_hint: ClassVar[str]
    """How many embeddings an image has, by those of a view, of a tile, and the most."""

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        # The published code begins every prompt with BOS, which transformers drops of a byte-level
        # tokenizer whose class is said to be Llama's.
        if self.is_original and getattr(ctx.tokenizer, "add_bos_token", None) is False:
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
        hf_class = load_class("DeepseekOcr2", "deepseek_ocr2")
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=self.load_tiles(hf_class, self.own_inputs),
        )

    def load_tiles(self, hf_class: Any, views: ViewHostInputs) -> ViewAndTiles:
        """Return the part for images, around one of HF's class."""
        raise NotImplementedError

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger number of tiles of the checkpoint's and the operator's."""
        cutter: ViewAndTiles = self.get_image_processor()
        switch = {_SWITCH: True} if _SWITCH in cutter.valid_kwargs else {}
        most = self.find_larger(lambda kwargs: cutter.get_limits({**kwargs, **switch})[1])
        return {**switch, "max_patches": most}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of an image with the most embeddings, and how many."""
        cutter: ViewAndTiles = self.get_image_processor()
        _, most = cutter.get_limits(self.scope_kwargs(self.get_planned_mm_kwargs()))
        # One above the other: behind each line of a tile may be a newline. One of a tile's size is
        # not cut.
        side = cutter.sides.tile + 1
        size = ImageSize(width=side, height=max(most, 1) * side)
        return size, self.own_inputs.count_tokens(1, most)

    @cached_property
    def known_counts(self) -> Sequence[int]:
        """How many embeddings an image may have, the fewest first."""
        grids = [(0, 0), *list_arrangements(1, self.own_inputs.max_tiles)]
        return sorted({self.own_inputs.count_tokens(*grid) for grid in grids})

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Demand the rows of a view, of no tiles or a grid of them, and what is between."""
        known, tiles = self.known_counts, self.own_inputs.max_tiles
        hint = self.rows_hint.format(view=known[0], most=known[-1], tile=TILE_TOKENS, tiles=tiles)
        self.check_rows(modality, num_embeds, known, hint)

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
            on_host=self.host_tensors,
        )

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        return len(self.own_inputs.embed_rows(tensors))


class DeepseekOcr2ProcessingInfo(ViewInfo):
    host_inputs = DeepseekOcr2HostInputs
    host_tensors = ("num_local_patches",)
    rows_hint = "{view}, and {tile} for each of up to {tiles} tiles"

    def load_tiles(self, hf_class: Any, views: ViewHostInputs) -> ViewAndTiles:
        if self.is_original:
            hf = hf_class(**views.sides.settings)
        else:
            hf = hf_class.from_pretrained(self.ctx.model_config.path)
        # HF: `DeepseekOcr2Processor.images_kwargs`, whatever preprocessor_config.json says.
        hf.min_patches, hf.max_patches = 2, views.max_tiles
        return ViewAndTiles(hf, views, may_be_uncut=False)


class DeepseekOcrProcessingInfo(ViewInfo):
    host_inputs = DeepseekOcrHostInputs
    host_tensors = ("num_local_patches", "patches_grid")
    rows_hint = (
        "{view} of its view with newlines and a separator, and those of a grid of up to {tiles} "
        "tiles with a newline behind each line: {most} at most"
    )

    def load_tiles(self, hf_class: Any, views: ViewHostInputs) -> ViewAndTiles:
        """Take the settings of Unlimited-OCR's class in HF: what they leave out is as there."""
        sides, served = views.sides, "UnlimitedOcrImageProcessor"
        settings: Mapping[str, Any] = {**sides.settings, "maximum_pad_value": sides.tile}
        if not self.is_original:
            settings = load_image_settings(self.ctx.model_config.path)
        found = (settings.get("image_processor_type") or served).removesuffix("Fast")
        key, where = "image_processor_type", "preprocessor_config.json"
        check_settings({key: found}, {key: served}, where=where, source="mmjax knows")
        padded = settings.get("maximum_pad_value", 640)
        if padded >= sides.view:
            raise CheckpointError(
                f"`maximum_pad_value` of preprocessor_config.json is {padded}; an image that is "
                f"not cut would be squeezed to {sides.view} x {sides.view} pixels, and mmjax pads "
                "it: the key must be smaller"
            )
        own = {**Sides(1024, 640).settings, "max_patches": views.max_tiles}
        hf = make_image_processor(hf_class, {**own, **settings})
        return ViewAndTiles(hf, views, may_be_uncut=True)


class UnlimitedOcrProcessingInfo(DeepseekOcrProcessingInfo):
    chat_template = write_turns(
        start="''", content=write_parts("part.text | trim", image=IMAGE), answer="''"
    )
    tasks: ClassVar = {"Page": "document parsing.", "Pages": "Multi page parsing."}
    host_inputs = UnlimitedOcrHostInputs


FACTORIES = make_factories(DeepseekOcr2ProcessingInfo)
DEEPSEEK_OCR_FACTORIES = make_factories(DeepseekOcrProcessingInfo)
UNLIMITED_FACTORIES = make_factories(UnlimitedOcrProcessingInfo)
