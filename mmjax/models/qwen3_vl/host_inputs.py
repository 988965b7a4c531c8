"""Qwen3-VL's host inputs: Qwen2-VL's, and the learned positions that are a patch's."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.models.host_inputs import find_places, find_position_taps
from mmjax.models.qwen2_vl.host_inputs import Qwen2VLHostInputs, read_grid


class Qwen3VLHostInputs(Qwen2VLHostInputs):
    """A square of learned positions is stretched over each frame, from corner to corner."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.num_fed_layers = len(hf_config.vision_config.deepstack_visual_indexes)

    def read_inputs(self, vision: Any) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the encoder's inputs: the shape and dtype of a patch's row."""
        taps = {"position_ids": ((4,), "int32"), "position_weights": ((4,), "float32")}
        return {**super().read_inputs(vision), **taps}

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of a picture or a video, and what each of them depends on."""
        time, rows, columns = read_grid(item)
        places = find_places(rows, columns, self.merge_size)
        side = math.isqrt(self.hf_config.vision_config.num_position_embeddings)
        taps = find_position_taps(
            places, (rows, columns), side, kernel="bilinear", aligns_corners=True
        )
        repeated = {name: np.tile(each, (time, 1)) for name, each in taps.items()}
        return {**super().units(item), **repeated}
