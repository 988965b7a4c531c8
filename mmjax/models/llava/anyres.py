"""AnyRes, as LLaVA-NeXT has it (Liu et al., 2024): a picture as a whole, and a canvas of its tiles.

The canvas is that of `image_grid_pinpoints` on which most of the picture's pixels are kept. What is
padding there has no embeddings, and a learned one ends each row of the rest.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.processing.items.items import ImageSize

NEWLINE = -1
"""`image_newline`, as `embed_rows` counts the model's extra embeddings."""


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


def choose_canvas(size: ImageSize, canvases: Sequence[ImageSize]) -> ImageSize:
    """Return the canvas on which most of a picture's pixels are kept; of such, the smallest."""

    def rate(canvas: ImageSize) -> tuple[int, int]:
        scale = min(canvas.width / size.width, canvas.height / size.height)
        kept = int(size.width * scale) * int(size.height * scale)
        return min(kept, size.width * size.height), -canvas.width * canvas.height

    return max(canvases, key=rate)


def find_kept(size: ImageSize, rows: int, columns: int) -> tuple[slice, slice]:
    """Return which rows and columns of a canvas's patches a picture lies on.

    Padding goes away in pairs, a row on either side, as the published code rounds it.
    """
    if size.width / size.height > columns / rows:
        margin = (rows - int(round(size.height * (columns / size.width), 7))) // 2
        return slice(margin, rows - margin), slice(0, columns)
    margin = (columns - int(round(size.width * (rows / size.height), 7))) // 2
    return slice(0, rows), slice(margin, columns - margin)


def number_cells(tiles: tuple[int, int], side: int) -> np.ndarray:
    """Return int[rows, columns] of patches: the number of each among those of the tiles.

    `tiles`: rows and columns of them; `side`: patches along a tile's.
    """
    rows, columns = tiles
    cells = np.arange(rows * columns * side**2).reshape(rows, columns, side, side)
    return cells.swapaxes(1, 2).reshape(rows * side, columns * side)


def arrange(size: ImageSize, tiles: tuple[int, int], side: int) -> np.ndarray:
    """Return int32[num_embeds] of a picture on so many rows and columns of tiles, as `embed_rows`.

    The whole comes first; its patches are those of the first unit.
    """
    cells = side**2 + number_cells(tiles, side)
    kept = cells[find_kept(size, *cells.shape)]
    lines = np.pad(kept, ((0, 0), (0, 1)), constant_values=NEWLINE)
    return np.concatenate([np.arange(side**2), lines.reshape(-1)]).astype(np.int32)
