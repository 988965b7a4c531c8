"""Overlapping crops of one size, as Molmo (arXiv 2409.17146) and Molmo 2 lay them over an image."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mmjax.errors import RequestValueError

MAX_CROPS = 128
"""No model has seen as many, and the time to list tilings grows with their number."""


class Grid(NamedTuple):
    """Tiles, or tokens, along each axis."""

    rows: int
    columns: int


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


def resolve_max_crops(kwargs: Mapping[str, Any], default: int) -> int:
    """Return how many crops a request may have of a tiled image; refuse what is no number."""
    given = kwargs.get("max_crops")
    value = default if given is None else given
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_CROPS:
        raise RequestValueError(
            f"`max_crops` is {value!r}; it must be a number of crops from 1 to {MAX_CROPS}",
            param="mm_processor_kwargs",
        )
    return value
