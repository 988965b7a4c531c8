"""Host inputs of families whose items are grids: patches, where they stand, and M-RoPE.

A grid is (time, rows, columns) of patches. The patches of a frame come square by square of
`spatial_merge_size` patches a side, which is one embedding, a cell; or row by row.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from mmjax.errors import CheckpointError, RequestRuntimeError
from mmjax.models.host_inputs import (
    HostInputs,
    PackedEncoderSpec,
    PromptItem,
    RotaryPositions,
    byte_pixels,
    find_places,
    find_position_taps,
    find_square_offsets,
)

Grid = tuple[int, int, int]
"""Time, rows, columns."""


class GridHostInputs(HostInputs):
    """Patches with their row and column in a frame; a frame's see each other."""

    position_kernel: ClassVar[Literal["bilinear", "bicubic"] | None] = None
    """How a square of learned positions is stretched over a frame; None: the tower has none."""
    aligns_corners: ClassVar[bool] = False
    """Whether the first and the last patch have the first and the last position."""
    is_row_by_row: ClassVar[bool] = False
    """Whether patches come row by row, of pictures alone; else square by square."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.merge_size: int = hf_config.vision_config.spatial_merge_size
        self.encoder_spec = PackedEncoderSpec(
            inputs=self.read_inputs(hf_config.vision_config),
            patches_per_token=self.merge_size**2,
        )

    def read_inputs(self, vision: Any) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the encoder's inputs: the shape and dtype of a patch's row."""
        inputs: dict[str, tuple[tuple[int, ...], str]] = {"places": ((2,), "int32")}
        if self.is_row_by_row:
            size = vision.patch_size
            inputs |= byte_pixels("pixel_values", (vision.num_channels, size, size))
            inputs["square_offsets"] = ((), "int32")
        else:
            width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            inputs |= byte_pixels("pixel_values", (width,))
            inputs["frame_ids"] = ((), "int32")
        if self.position_kernel is not None:
            num_taps = (4 if self.position_kernel == "bilinear" else 16,)
            inputs["position_ids"] = (num_taps, "int32")
            inputs["position_weights"] = (num_taps, "float32")
        return inputs

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of a picture or a video, and what each of them depends on."""
        time, rows, columns = read_grid(item)
        places = find_places(rows, columns, 1 if self.is_row_by_row else self.merge_size)
        frame = {"places": places}
        if self.position_kernel is not None:
            frame |= find_position_taps(
                places,
                (rows, columns),
                find_side(self.hf_config.vision_config),
                kernel=self.position_kernel,
                aligns_corners=self.aligns_corners,
            )
        name = "pixel_values" if "image_grid_thw" in item else "pixel_values_videos"
        units = {key: np.tile(each, (time, 1)) for key, each in frame.items()}
        units["pixel_values"] = item[name]
        if self.is_row_by_row:
            offsets = find_square_offsets(rows, columns, self.merge_size)
            return {**units, "square_offsets": offsets}
        return {**units, "frame_ids": np.repeat(np.arange(time), rows * columns)}

    def rotary_positions(
        self, num_tokens: int, items: Sequence[PromptItem]
    ) -> RotaryPositions | None:
        """Return a cell's time, row and column; text goes on behind the larger side of a frame.

        As HF's `get_rope_index`, and its `generate` behind the prompt: both leave a video's time
        out of where the text goes on. (The paper, section 2.1, has it go on behind all three.)
        A video whose frames have text between them (Qwen3-VL) is as many pictures.
        """
        if not items:
            return None
        parts, index, place = [], 0, 0
        for item in items:
            for first, cells, extent in self.find_runs(item):
                parts.append(np.tile(np.arange(first - index) + place, (3, 1)))
                place += first - index
                parts.append(cells + place)
                place += extent
                index = first + cells.shape[1]
        parts.append(np.tile(np.arange(num_tokens - index) + place, (3, 1)))
        prompt = np.concatenate(parts, axis=1).astype(np.int32)
        return RotaryPositions(prompt, place - index)

    def find_runs(self, item: PromptItem) -> Iterator[tuple[int, np.ndarray, int]]:
        """Yield the runs of an item's tokens that are not positioned as text.

        Of each: where it begins in the prompt, int[3, tokens] from the position that text would
        have there, and how far behind that the text goes on.
        """
        runs = item.position.extract_embeds_range()
        time, rows, columns = self._find_run_grid(item, len(runs))
        cells = self.find_cells(item.tensors, (time, rows, columns))
        for first, _ in runs:
            yield first, cells, self.find_extent(cells)

    def find_cells(self, item: Mapping[str, np.ndarray], grid: Grid) -> np.ndarray:
        """Return int[3, cells]: time, row and column of each, in order."""
        cells = np.indices(grid).reshape(3, -1)
        cells[0] = self.times(item, grid[0])[cells[0]]
        return cells

    def find_extent(self, cells: np.ndarray) -> int:
        """Return how far behind a run's first position the text goes on.

        `cells`: int[3, cells]: time, row and column of each.
        """
        return int(cells[1:].max()) + 1

    def _find_run_grid(self, item: PromptItem, num_runs: int) -> Grid:
        """Return the steps, rows and columns of the cells of each of an item's runs."""
        time, rows, columns = read_grid(item.tensors)
        rows, columns = rows // self.merge_size, columns // self.merge_size
        num_embeds = item.position.get_num_embeds()
        if time * rows * columns != num_embeds or time % num_runs:
            raise RequestRuntimeError(
                f"an item's grid has {time * rows * columns} embeddings, and the prompt "
                f"placeholders for {num_embeds}; they must agree",
                param="multi_modal_data",
            )
        return time // num_runs, rows, columns

    def times(self, item: Mapping[str, np.ndarray], count: int) -> np.ndarray:
        """Return the position on the axis of time of each of `count` steps."""
        return np.arange(count)


class TimedGridHostInputs(GridHostInputs):
    """The same, seconds on the axis of time."""

    tokens_per_second: float

    def times(self, item: Mapping[str, np.ndarray], count: int) -> np.ndarray:
        """Return the steps of a video in `tokens_per_second`, cut to whole ones; as HF, in float32.

        Embeddings may come without seconds: a step is one then, as in HF.
        """
        if "video_grid_thw" not in item:
            return super().times(item, count)
        seconds = np.float32(item.get("second_per_grid_ts", 1.0))
        interval = np.float32(self.tokens_per_second) * seconds
        return (np.arange(count, dtype=np.float32) * interval).astype(np.int64)


class WindowGridHostInputs(TimedGridHostInputs):
    """The same, window by window."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision = hf_config.vision_config
        self.window_side = vision.window_size // self.merge_size // vision.patch_size
        if self.window_side < 1:
            raise CheckpointError(
                f"`vision_config.window_size` is {vision.window_size}, less than the "
                f"{self.merge_size * vision.patch_size} pixels of one embedding's side"
            )
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

    def _find_windows(self, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
        """Return the cells in the order of their windows, and the window of each of these."""
        time, rows, columns = grid[0], grid[1] // self.merge_size, grid[2] // self.merge_size
        side = self.window_side
        frame, row, column = np.indices((time, rows, columns)).reshape(3, -1)
        per_column, per_row = -(-rows // side), -(-columns // side)
        windows = (frame * per_column + row // side) * per_row + column // side
        order = np.argsort(windows, kind="stable")
        return order, windows[order]


def read_grid(item: Mapping[str, np.ndarray]) -> Grid:
    """Return the grid of a picture or a video; KeyError where there is none."""
    name = "image_grid_thw" if "image_grid_thw" in item else "video_grid_thw"
    time, rows, columns = (int(size) for size in item[name])
    return time, rows, columns


def find_side(vision: Any) -> int:
    """Return the side of the square of a tower's learned positions."""
    number = getattr(vision, "num_position_embeddings", None)
    if number is not None:
        return math.isqrt(number)
    size = getattr(vision, "max_image_size", None) or vision.image_size
    return size // vision.patch_size
