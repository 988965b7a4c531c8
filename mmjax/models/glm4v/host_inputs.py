"""GLM-4.1V's host inputs: Qwen2-VL's, and the learned positions that are a patch's."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.models.host_inputs import find_places, find_position_taps
from mmjax.models.qwen2_vl.host_inputs import Qwen2VLHostInputs, read_grid


class GlmOcrHostInputs(Qwen2VLHostInputs):
    """Patches with their places in a frame; each frame of a video is as a picture by itself."""


class Glm4vHostInputs(GlmOcrHostInputs):
    """The same, and learned positions that are resampled to a frame's grid."""

    def read_inputs(self, vision: Any) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the encoder's inputs: the shape and dtype of a patch's row."""
        taps = {"position_ids": ((16,), "int32"), "position_weights": ((16,), "float32")}
        return {**super().read_inputs(vision), **taps}

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of a picture or a video, and what each of them depends on."""
        time, rows, columns = read_grid(item)
        vision, places = self.hf_config.vision_config, find_places(rows, columns, self.merge_size)
        side = vision.image_size // vision.patch_size
        taps = find_position_taps(places, (rows, columns), side, kernel="bicubic")
        repeated = {name: np.tile(each, (time, 1)) for name, each in taps.items()}
        return {**super().units(item), **repeated}
