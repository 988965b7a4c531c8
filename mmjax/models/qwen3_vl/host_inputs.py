"""Qwen3-VL's and Qwen3.5's host inputs: grids, and the learned positions that are a patch's."""

from typing import Any

from mmjax.models.grid_inputs import GridHostInputs


class Qwen3VLHostInputs(GridHostInputs):
    """A square of learned positions is stretched over each frame, from corner to corner."""

    position_kernel = "bilinear"
    aligns_corners = True

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        # Qwen3.5's tower feeds none.
        fed = getattr(hf_config.vision_config, "deepstack_visual_indexes", ())
        self.fed_layers = tuple(range(1, 1 + len(fed)))
