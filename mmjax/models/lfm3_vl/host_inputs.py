"""LFM3-VL's encoder inputs: packed patches, and which of them lie around each in its frame."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmjax.models.grid_inputs import GridHostInputs, read_grid
from mmjax.models.host_inputs import PromptItem, RotaryPositions, find_neighbours


class Lfm3VLHostInputs(GridHostInputs):
    """Patches square by square; a token's position is its index, whatever stands there."""

    def read_inputs(self, vision: Any) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the same, and the patches around each."""
        around = {"neighbours": ((vision.conv_kernel_size**2,), "int32")}
        return {**super().read_inputs(vision), **around}

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the same, and the patches around each, which are of its own frame."""
        time, rows, columns = read_grid(item)
        size = self.hf_config.vision_config.conv_kernel_size
        around = find_neighbours(rows, columns, self.merge_size, size)
        return {**super().units(item), "neighbours": np.tile(around, (time, 1))}

    def rotary_positions(
        self, num_tokens: int, items: Sequence[PromptItem]
    ) -> RotaryPositions | None:
        """Return None: positions are the tokens' indices."""
        return None
