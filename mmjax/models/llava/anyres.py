"""AnyRes, as LLaVA-NeXT has it (Liu et al., 2024): a picture as a whole, and a canvas of its tiles.

The canvas is that of `image_grid_pinpoints` on which most of the picture's pixels are kept. What is
padding there has no embeddings, and a learned one ends each row of the rest.
"""

from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import end_lines, number_cells
from mmjax.processing.items.items import ImageSize


def read_canvases(hf_config: Any) -> list[ImageSize]:
    """Return the canvases in the order of config.json; `CheckpointError` for no whole tiles."""
    side, found = hf_config.vision_config.image_size, hf_config.image_grid_pinpoints
    for one in found:
        if len(one) != 2 or any(pixels < side or pixels % side for pixels in one):
            raise CheckpointError(
                f"`image_grid_pinpoints` of config.json has {list(one)}; each must be the height "
                f"and the width of whole tiles of {side} pixels, as `vision_config.image_size` says"
            )
    if not found:
        raise CheckpointError(
            "`image_grid_pinpoints` of config.json is empty; give heights and widths of canvases"
        )
    return [ImageSize(width=width, height=height) for height, width in found]


def find_kept(size: ImageSize, rows: int, columns: int) -> tuple[slice, slice]:
    """Return which rows and columns of a canvas's patches a picture lies on.

    Padding goes away in pairs, a row on either side, as the published code rounds it.
    """
    if size.width / size.height > columns / rows:
        margin = (rows - int(round(size.height * (columns / size.width), 7))) // 2
        return slice(margin, rows - margin), slice(0, columns)
    margin = (columns - int(round(size.width * (rows / size.height), 7))) // 2
    return slice(0, rows), slice(margin, columns - margin)


def arrange(size: ImageSize, tiles: tuple[int, int], side: int) -> np.ndarray:
    """Return int32[num_embeds] of a picture on so many rows and columns of tiles, as `embed_rows`.

    The whole comes first; its patches are those of the first unit.
    """
    cells = side**2 + number_cells(tiles, side)
    kept = cells[find_kept(size, *cells.shape)]
    return np.concatenate([np.arange(side**2), end_lines(kept)]).astype(np.int32)


def resample(cells: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return int32 and float32[rows * columns, 4]: of which cells a new one is made, and weights.

    As torch's bilinear `interpolate`: edges are repeated, and nothing is antialiased.
    """
    (top, down), (left, right) = (_mix(*n) for n in zip(cells.shape, (rows, columns), strict=True))
    taps = cells[top[:, None, :, None], left[None, :, None, :]].reshape(-1, 4)
    weights = (down[:, None, :, None] * right[None, :, None, :]).reshape(-1, 4)
    return taps.astype(np.int32), weights


def _mix(old: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    """Return int and float32[new, 2]: the two places that a new one lies between, and weights."""
    places = (np.arange(new, dtype=np.float32) + np.float32(0.5)) * np.float32(old / new)
    places = np.maximum(places - np.float32(0.5), 0)
    first = np.minimum(places.astype(int), old - 1)
    share = places - first.astype(np.float32)
    taps = np.stack([first, np.minimum(first + 1, old - 1)], axis=1)
    return taps, np.stack([1 - share, share], axis=1).astype(np.float32)
