"""Ovis2's encoder inputs: the whole picture and its tiles, each a unit, and marks between them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs

MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
"""In the order of `visual_indicator_token_ids`; the n-th is the extra embedding -1 - n."""
START, GRID, COLUMN, ROW, END = (-1 - number for number in range(len(MARKS)))


def arrange(rows: int, columns: int, per_tile: int) -> np.ndarray:
    """Return int32[num_embeds] of a picture of so many tiles: its embeddings, as `embed_rows`.

    The whole comes first, and alone where the picture is not cut.
    """
    num_cut = rows * columns if rows * columns > 1 else 0
    cells = np.arange((1 + num_cut) * per_tile).reshape(-1, per_tile)
    behind = np.full((rows, columns), COLUMN)
    behind[:, -1], behind[-1, -1] = ROW, END
    tiles = np.append(cells[1:], behind.reshape(-1, 1)[:num_cut], axis=1)
    last = [] if num_cut else [END]
    return np.concatenate([[START], cells[0], [GRID], tiles.reshape(-1), last]).astype(np.int32)


class Ovis2HostInputs(UnitHostInputs):
    """Tiles of one size; an embedding is a square of `hidden_stride` patches a side."""

    num_extra_rows = len(MARKS)

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        shape, num_patches = UnitHostInputs.read_unit(hf_config)
        stride, side = hf_config.vision_config.hidden_stride, round(num_patches**0.5)
        if stride < 1 or side % stride:
            raise CheckpointError(
                f"`vision_config.hidden_stride` is {stride}; it must divide the {side} patches of "
                "a tile's side"
            )
        return shape, (side // stride) ** 2

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of all tiles, and the marks around and among them."""
        rows, columns = item["image_grids"].tolist()
        _, per_tile = self.read_unit(self.hf_config)
        return arrange(rows, columns, per_tile)
