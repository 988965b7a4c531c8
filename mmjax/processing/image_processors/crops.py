"""Overlapping crops of one size, as Molmo (arXiv 2409.17146) and Molmo 2 lay them over an image."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mmjax.processing.image_processors.image import check_count, patchify
from mmjax.processing.items.items import ImageSize
from mmjax.rounding import cdiv

MAX_TILES = 128
"""No model has seen as many, and the time to list tilings grows with their number."""


class Grid(NamedTuple):
    """Tiles, or tokens, along each axis."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappingCrops:
    """How crops of one size lie over an image."""

    crop_side: int
    """In pixels."""
    patch_size: int
    overlap_margins: Sequence[int] = (4, 4)
    """Patches that a crop leaves to the one before it and to the one behind, on either axis."""
    max_crops: int
    """Crops of the tiled image, at most; the crop of the whole image is added to them."""

    @property
    def crop_patches(self) -> int:
        """Patches of a crop along a side."""
        return self.crop_side // self.patch_size

    @property
    def window_patches(self) -> int:
        """Patches between the beginnings of two crops."""
        return self.crop_patches - sum(self.overlap_margins)

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return frozenset({"max_crops"})

    def size_of(self, tiling: Grid) -> ImageSize:
        """Return the size that an image is brought to for a tiling, padding included, in pixels."""
        margin = sum(self.overlap_margins)
        height, width = (
            (tiles * self.window_patches + margin) * self.patch_size for tiles in tiling
        )
        return ImageSize(width=width, height=height)

    def count_windows(self, tiling: Grid, rows: int, columns: int) -> Grid:
        """Return how many windows of so many patches a tiled image has along each axis."""
        size, patch_size = self.size_of(tiling), self.patch_size
        return Grid(cdiv(size.height // patch_size, rows), cdiv(size.width // patch_size, columns))

    def choose(self, size: ImageSize, max_crops: int) -> Grid:
        """Return the tiling of an image."""
        margin = sum(self.overlap_margins) * self.patch_size
        return choose_tiling(
            size.height - margin,
            size.width - margin,
            window=self.window_patches * self.patch_size,
            max_crops=max_crops,
        )

    def cut_patches(self, pixels: np.ndarray, tiling: Grid) -> np.ndarray:
        """Cut [C, height, width] into the crops' patches, [crops, patches, values]."""
        side, window = self.crop_side, self.window_patches * self.patch_size
        crops = [
            pixels[:, row * window : row * window + side, column * window : column * window + side]
            for row in range(tiling.rows)
            for column in range(tiling.columns)
        ]
        return np.stack([patchify(crop, self.patch_size, self.patch_size) for crop in crops])

    def number_cells(self, tiling: Grid, cell_side: int = 1) -> np.ndarray:
        """Return int[rows, columns] of the tiled image's cells: their numbers in its crops.

        A cell is a square of patches, so many a side. Of one that several crops have, it is the
        number in the crop whose margin it is not in.
        """
        side = self.crop_patches // cell_side
        before, behind = (margin // cell_side for margin in self.overlap_margins)
        numbers = np.arange(tiling.rows * tiling.columns * side**2)
        numbers = numbers.reshape(tiling.rows, tiling.columns, side, side)
        is_read = np.ones_like(numbers, bool)
        is_read[1:, :, :before] = False
        is_read[:, 1:, :, :before] = False
        is_read[:-1, :, side - behind :] = False
        is_read[:, :-1, :, side - behind :] = False
        order, is_read = numbers.transpose(0, 2, 1, 3), is_read.transpose(0, 2, 1, 3)
        size = self.size_of(tiling)
        return order[is_read].reshape(size.height // (self.patch_size * cell_side), -1)

    def resolve_max_crops(self, kwargs: Mapping[str, Any]) -> int:
        """Return how many crops a request may have of a tiled image; refuse what is no number."""
        given = kwargs.get("max_crops")
        value = self.max_crops if given is None else given
        return check_count("max_crops", value, MAX_TILES, "crops")

    def find_most(
        self, kwargs: Mapping[str, Any], count: Callable[[Grid], int]
    ) -> tuple[ImageSize, int]:
        """Return the size of an image whose tiling has the most by `count`, and how many."""
        tilings = list_tilings(self.resolve_max_crops(kwargs))
        counts = [count(tiling) for tiling in tilings]
        return self.size_of(tilings[counts.index(max(counts))]), max(counts)


@lru_cache(maxsize=16)
def list_tilings(max_crops: int) -> list[Grid]:
    """Return every grid of at most `max_crops` tiles, those of fewer tiles and rows first."""
    tilings = [
        Grid(rows, columns)
        for rows in range(1, max_crops + 1)
        for columns in range(1, max_crops // rows + 1)
    ]
    return sorted(tilings, key=lambda one: (one.rows * one.columns, one.rows))


def choose_tiling(height: int, width: int, *, window: int, max_crops: int) -> Grid:
    """Return the grid that an image is enlarged least for, or else shrunk least.

    Args:
        height: In pixels, less both margins; may be negative, and is then computed with as is.
        width: Likewise.
        window: Side of a tile, in pixels.
        max_crops: Of the tiled image.
    """
    tilings = list_tilings(max_crops)
    pixels = np.array(tilings, np.float32) * np.float32(window)
    with np.errstate(divide="ignore"):
        scales = (pixels / np.array([height, width], np.float32)).min(axis=1)
    if (scales < 1).all():
        return tilings[int(scales.argmax())]
    return tilings[int(np.where(scales < 1, np.inf, scales).argmin())]
