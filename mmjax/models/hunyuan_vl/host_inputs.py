"""HunyuanOCR's host inputs: patches row by row, the rows' ends, positions of four axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmjax.models.grid_inputs import GridHostInputs, read_grid
from mmjax.models.host_inputs import PromptItem, RotaryPositions, byte_pixels, end_lines
from mmjax.rounding import mark

BEGIN, END = -2, -3
"""As `embed_rows` counts the model's extra embeddings, behind `NEWLINE`."""


class HunYuanVLHostInputs(GridHostInputs):
    """Patches with the learned positions around them; every one of a picture sees the others."""

    position_kernel = "bilinear"
    is_row_by_row = True
    num_extra_rows = 3

    def read_inputs(self, vision: Any) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the encoder's inputs: flat patches, whose places are in the learned positions."""
        inputs = super().read_inputs(vision)
        del inputs["places"]
        return inputs | byte_pixels("pixel_values", (vision.num_channels * vision.patch_size**2,))

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of a picture, and what each of them depends on."""
        units = super().units(item)
        # The table's first row is of no patch.
        return units | {"position_ids": units["position_ids"] + 1}

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return a picture's rows of cells, each with its end, between the picture's own marks."""
        _, rows, columns = read_grid(item)
        shape = (rows // self.merge_size, columns // self.merge_size)
        cells = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
        return np.concatenate([[BEGIN], end_lines(cells), [END]]).astype(np.int32)

    def rotary_positions(
        self, num_tokens: int, items: Sequence[PromptItem]
    ) -> RotaryPositions | None:
        """Return a cell's column, and its row with the number of its picture (`rounding.mark`).

        All tokens keep their index on the first axis, and the picture's marks on all of them. The
        end of a row is one more column.
        """
        if not items:
            return None
        positions = np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1))
        for number, item in enumerate(items):
            _, rows, columns = read_grid(item.tensors)
            row, column = np.indices((rows // self.merge_size, columns // self.merge_size + 1))
            first = item.position.offset + 1
            cells = slice(first, first + row.size)
            positions[1, cells] = column.reshape(-1)
            positions[2, cells] = mark(row.reshape(-1), number)
        return RotaryPositions(positions, 0)
