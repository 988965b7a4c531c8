"""GLM-4.1V's host inputs: grids, and the learned positions that are a patch's."""

from mmjax.models.grid_inputs import GridHostInputs


class Glm4vHostInputs(GridHostInputs):
    """Learned positions are resampled to a frame's grid; each frame is as a picture by itself."""

    position_kernel = "bicubic"
