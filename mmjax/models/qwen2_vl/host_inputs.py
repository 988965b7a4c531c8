"""Qwen2.5-VL's host inputs: Qwen2-VL's, which are those of all grids, in the order of windows."""

from typing import Any

from mmjax.models.grid_inputs import WindowGridHostInputs


class Qwen25VLHostInputs(WindowGridHostInputs):
    """Patches window by window; the positions of a second are the tower's key."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.tokens_per_second = hf_config.vision_config.tokens_per_second
