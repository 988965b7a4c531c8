"""Rows whose images are cut: into tiles, which the encoder takes one by one, or into crops."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from mmjax.models.family import FamilyInfo, FamilyProcessor, item_fields
from mmjax.processing.image_processors.crops import OverlappingCrops
from mmjax.processing.image_processors.tiling import (
    HFCutter,
    HFTileCutter,
    TileCutter,
    find_largest_picture,
)
from mmjax.processing.items.parse import ImageSize, MultiModalDataItems
from mmjax.processing.missing_items import ItemRow
from mmjax.processing.prepared import ProcessedItem
from mmjax.processing.tensors.fields import MultiModalFieldConfig


class CropsInfo(FamilyInfo):
    """A row whose `load_hf_processor` gives `OverlappingCrops` as the image processor.

    Whose `find_largest` returns the size of an image with the most embeddings, and how many.
    """

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger of the checkpoint's number of crops and the operator's."""
        cutter: OverlappingCrops = self.get_image_processor()
        return {"max_crops": self.find_larger(cutter.resolve_max_crops)}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of an image with the most embeddings, and how many."""
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs())
        return self.get_image_processor().find_largest(kwargs)


class TileGridInfo(FamilyInfo):
    """A row whose items' tokens depend on how many rows and columns of tiles they have."""

    grid_name: ClassVar[str]
    """The tensor that begins with both numbers. Behind several tiles comes the whole; an item of
    one (1 and 1), or that is not cut (0 and 0), is one unit."""

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        name = self.grid_name
        num_tiles = np.prod(np.asarray(outputs.get(name, np.ones((0, 2), int)))[:, :2], axis=1)
        counts = np.maximum(num_tiles, 1) + (num_tiles > 1)
        return item_fields("image", units=["pixel_values"], counts=counts, on_host=[name])

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> Hashable:
        return tuple(tensors[self.grid_name].tolist())


class TiledInfo(FamilyInfo):
    """A row whose `load_hf_processor` gives a `TileCutter` as the image processor."""

    image_processors: ClassVar[Mapping[str, str]] = {"GotOcr2": "got_ocr2"}
    cutter: ClassVar[type[HFCutter]] = HFTileCutter
    """Of that class of HF's, where the row keeps it."""
    tile_kwargs: ClassVar[tuple[str, str]] = ("crop_to_patches", "max_patches")
    """Names of the kwargs that enable tiles, and limit their number."""

    def get_unit_size(self) -> ImageSize | None:
        """Return nothing: the cutters refuse other tiles themselves."""

    def wrap_image_processor(self, hf_processor: Any) -> HFCutter:
        return self.cutter(hf_processor, self.unit_side)

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of an image with the most tiles, and how many embeddings it has."""
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs())
        size, num_tiles = find_largest_picture(self.get_image_processor(), kwargs)
        return size, num_tiles * self.num_unit_tokens

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return kwargs with the larger number of tiles of the checkpoint's and the operator's."""
        switch, name = self.tile_kwargs
        cutter: TileCutter = self.get_image_processor()
        most = self.find_larger(lambda kwargs: cutter.get_limits({**kwargs, switch: True})[1])
        return {switch: True, name: most}

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        tiles = outputs.get("image_num_patches", ())
        return item_fields(
            "image", units=["pixel_values"], counts=tiles, on_host=["image_num_patches"]
        )

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Demand the rows of whole tiles."""
        each, most = self.num_unit_tokens, self.get_max_image_tokens()
        hint = f"{each} for each of its tiles, the whole included, {most} at most"
        self.check_rows(modality, num_embeds, range(each, most + 1, each), hint)

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> Hashable:
        """Return how many embeddings all tiles of an item have."""
        return int(tensors[f"{modality}_num_patches"]) * self.num_unit_tokens


InfoT = TypeVar("InfoT", bound=FamilyInfo)


class FewCutProcessor(FamilyProcessor[InfoT]):
    """Of rows whose images are not cut into tiles where a prompt has many (kwarg `cropping`)."""

    max_cut_images: ClassVar[int]
    """Images of a prompt up to which they are cut, as the model was trained."""

    def _get_hash_kwargs(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Add what the number of images does to each of them."""
        if mm_items.get_count("image", strict=False) <= self.max_cut_images:
            return hf_processor_mm_kwargs
        return {**hf_processor_mm_kwargs, "cropping": False}

    def _process_rows(
        self,
        rows: Sequence[ItemRow],
        mm_items: MultiModalDataItems,
        mm_kwargs: Mapping[str, object],
    ) -> dict[str, ProcessedItem]:
        """Process what a cache lacks, or has lost, as one of all images of its request."""
        return super()._process_rows(rows, mm_items, self._get_hash_kwargs(mm_items, mm_kwargs))
