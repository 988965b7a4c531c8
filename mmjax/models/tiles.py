"""Rows whose images are cut: into tiles, which the encoder takes one by one, or into crops."""

from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

from mmjax.models.family import FamilyInfo, item_fields
from mmjax.processing.image_processors.crops import OverlappingCrops
from mmjax.processing.image_processors.tiling import TileCutter, find_largest_picture
from mmjax.processing.items.parse import ImageSize
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


class TiledInfo(FamilyInfo):
    """A row whose `load_hf_processor` gives a `TileCutter` as the image processor."""

    tile_kwargs: ClassVar[tuple[str, str]] = ("crop_to_patches", "max_patches")
    """Names of the kwargs that enable tiles, and limit their number."""

    def get_unit_size(self) -> None:
        """Return nothing: the cutters refuse other tiles themselves."""

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
