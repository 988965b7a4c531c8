"""Qwen3-VL's host inputs: Qwen2-VL's, and which learned positions lie around each patch."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.models.host_inputs import PackedEncoderSpec
from mmjax.models.qwen2_vl.host_inputs import Qwen2VLHostInputs, find_places, read_grid


class Qwen3VLHostInputs(Qwen2VLHostInputs):
    """A square of learned positions is stretched over each frame, from corner to corner."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision = hf_config.vision_config
        self.num_fed_layers = len(vision.deepstack_visual_indexes)
        self.side = math.isqrt(vision.num_position_embeddings)
        self.encoder_spec = PackedEncoderSpec(
            inputs={
                **self.encoder_spec.inputs,
                "taps": ((4,), "int32"),
                "tap_weights": ((4,), "float32"),
            },
            patches_per_token=self.merge_size**2,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches, their places and frames, and the four learned positions of each."""
        time, rows, columns = read_grid(item)
        places = find_places(rows, columns, self.merge_size)
        (down, down_weights), (right, right_weights) = (
            self._find_taps(places[:, axis], size) for axis, size in enumerate((rows, columns))
        )
        taps = down[:, :, None] * self.side + right[:, None, :]
        weights = down_weights[:, :, None] * right_weights[:, None, :]
        return super().units(item) | {
            "taps": np.tile(taps.reshape(-1, 4), (time, 1)),
            "tap_weights": np.tile(weights.reshape(-1, 4), (time, 1)),
        }

    def _find_taps(self, places: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return int[P, 2] and float32[P, 2]: the neighbours on one axis, and their weights.

        As HF's `get_vision_interpolation_indices_and_weights`, with its float32.
        """
        source = (
            places.astype(np.float32) * np.float32(self.side - 1) / np.float32(max(size - 1, 1))
        )
        floor = np.floor(source)
        taps = np.minimum(floor[:, None].astype(int) + np.arange(2), self.side - 1)
        share = source - floor
        return taps, np.stack([1 - share, share], axis=1)
