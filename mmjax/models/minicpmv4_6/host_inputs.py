"""MiniCPM-V 4.6's encoder inputs: packed patches of whole pictures, of slices and of frames."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import (
    HostInputs,
    PackedEncoderSpec,
    byte_pixels,
    find_places,
    find_square_offsets,
)

WINDOW = 4
"""Patches that the tower joins, and patches of which the projector makes an embedding."""
_MODES = ("16x", "4x")
_SQUARES = {"merge_kernel_size": (2, 2), "merger_times": 1}


def joins_windows(hf_config: Any) -> bool:
    """Return whether the tower joins windows of patches; CheckpointError for unknown shapes."""
    vision, mode = hf_config.vision_config, hf_config.downsample_mode
    found = {name: getattr(hf_config, name) for name in _SQUARES}
    found["merge_kernel_size"] = tuple(found["merge_kernel_size"])
    window = tuple(vision.window_kernel_size)
    if found != _SQUARES or window != (2, 2) or mode not in _MODES:
        raise CheckpointError(
            f"config.json has `merge_kernel_size` {list(found['merge_kernel_size'])}, "
            f"`merger_times` {found['merger_times']}, `window_kernel_size` {list(window)} and "
            f"`downsample_mode` {mode!r}; HF's processor writes the embeddings of [2, 2], 1, "
            f"[2, 2] and one of {', '.join(_MODES)}"
        )
    if mode == "16x" and not 0 <= hf_config.insert_layer_id < vision.num_hidden_layers:
        raise CheckpointError(
            f"`insert_layer_id` of config.json is {hf_config.insert_layer_id}; the tower has the "
            f"layers 0 to {vision.num_hidden_layers - 1}"
        )
    return mode == "16x"


class MiniCPMV46HostInputs(HostInputs):
    """Patches row by row; squares of 4 patches a side are embeddings, or of 2 (`4x`)."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision, self.joins_windows = hf_config.vision_config, joins_windows(hf_config)
        self.side = vision.image_size // vision.patch_size
        size = (vision.num_channels, vision.patch_size, vision.patch_size)
        offsets = ("square_offsets", *["window_offsets"] * self.joins_windows)
        self.encoder_spec = PackedEncoderSpec(
            inputs={
                **byte_pixels("pixel_values", size),
                **dict.fromkeys(("unit_ids", "position_ids", *offsets), ((), "int32")),
            },
            patches_per_token=WINDOW**2 if self.joins_windows else WINDOW,
            patches_per_key=WINDOW if self.joins_windows else 1,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of all units, and what each of them depends on."""
        suffix = "_videos" if "pixel_values_videos" in item else ""
        shapes = [(int(rows), int(columns)) for rows, columns in item[f"target_sizes{suffix}"]]
        units = {
            "pixel_values": item[f"pixel_values{suffix}"],
            "unit_ids": np.repeat(np.arange(len(shapes)), [rows * cols for rows, cols in shapes]),
            "position_ids": np.concatenate([self._find_positions(*shape) for shape in shapes]),
        }
        windows = [find_square_offsets(*shape, 2) for shape in shapes]
        if not self.joins_windows:
            return {**units, "square_offsets": np.concatenate(windows)}
        # A row for each patch, of which the device takes one for each window.
        squares = [find_square_offsets(rows // 2, columns // 2, 2) for rows, columns in shapes]
        return {
            **units,
            "window_offsets": np.concatenate(windows),
            "square_offsets": np.repeat(np.concatenate(squares), WINDOW),
        }

    def _find_positions(self, rows: int, columns: int) -> np.ndarray:
        """Return int[rows * columns]: the learned position nearest to each patch.

        NOTE: HF compares float32, and has the one before where a patch meets a border that it
        rounds up; with the 70 of published towers there is none (up to 800 patches).
        """
        nearest = find_places(rows, columns, 1) * self.side // (rows, columns)
        return nearest @ (self.side, 1)
