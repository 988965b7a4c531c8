"""PaddleOCR-VL's host inputs: patches row by row, the learned positions that are theirs."""

from mmjax.models.grid_inputs import GridHostInputs


class PaddleOCRVLHostInputs(GridHostInputs):
    """Patches with their places; every one of a picture sees the others."""

    position_kernel = "bilinear"
    is_row_by_row = True
