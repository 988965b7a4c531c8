"""Qwen2.5-VL's host inputs: Qwen2-VL's, which are those of all grids, in the order of windows."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.grid_inputs import Grid, GridHostInputs, read_grid
from mmjax.models.host_inputs import PackedEncoderSpec


class Qwen25VLHostInputs(GridHostInputs):
    """The same, window by window; seconds on the axis of time."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision = hf_config.vision_config
        self.window_side = vision.window_size // self.merge_size // vision.patch_size
        if self.window_side < 1:
            raise CheckpointError(
                f"`vision_config.window_size` is {vision.window_size}, less than the "
                f"{self.merge_size * vision.patch_size} pixels of one embedding's side"
            )
        self.tokens_per_second: float = vision.tokens_per_second
        self.encoder_spec = PackedEncoderSpec(
            inputs={**self.encoder_spec.inputs, "window_ids": ((), "int32")},
            patches_per_token=self.merge_size**2,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return patches, places, frames and windows in the order of the windows."""
        order, windows = self._find_windows(read_grid(item))
        per_cell = self.merge_size**2
        patches = (order[:, None] * per_cell + np.arange(per_cell)).reshape(-1)
        units = {name: np.asarray(rows) for name, rows in super().units(item).items()}
        if len(units["pixel_values"]) == len(patches):  # else it is the engine's to say
            units = {name: rows[patches] for name, rows in units.items()}
        return units | {"window_ids": np.repeat(windows, per_cell)}

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return where each cell of the grid stands among the windows' cells."""
        order, _ = self._find_windows(read_grid(item))
        return np.argsort(order).astype(np.int32)

    def times(self, item: Mapping[str, np.ndarray], count: int) -> np.ndarray:
        """Return the steps of a video in `tokens_per_second`, cut to whole ones; as HF, in float32.

        Embeddings may come without seconds: a step is one then, as in HF.
        """
        if "video_grid_thw" not in item:
            return super().times(item, count)
        seconds = np.float32(item.get("second_per_grid_ts", 1.0))
        interval = np.float32(self.tokens_per_second) * seconds
        return (np.arange(count, dtype=np.float32) * interval).astype(np.int64)

    def _find_windows(self, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
        """Return the cells in the order of their windows, and the window of each of these."""
        time, rows, columns = grid[0], grid[1] // self.merge_size, grid[2] // self.merge_size
        side = self.window_side
        frame, row, column = np.indices((time, rows, columns)).reshape(3, -1)
        per_column, per_row = -(-rows // side), -(-columns // side)
        windows = (frame * per_column + row // side) * per_row + column // side
        order = np.argsort(windows, kind="stable")
        return order, windows[order]
