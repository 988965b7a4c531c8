"""Pixtral's encoder inputs: packed patches of pictures of any size."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import HostInputs, PackedEncoderSpec, byte_pixels


class PixtralHostInputs(HostInputs):
    """Patches with their places; each gives an embedding."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        check_whole_pictures(hf_config)
        vision = hf_config.vision_config
        width = vision.num_channels * vision.patch_size**2
        self.encoder_spec = PackedEncoderSpec(
            inputs={**byte_pixels("pixel_values", (width,)), "places": ((2,), "int32")},
            patches_per_token=1,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the picture's patches and their places."""
        return cut_patches(item["pixel_values"], self.hf_config.vision_config.patch_size)


def check_whole_pictures(hf_config: Any) -> None:
    """Refuse to drop a feature of Pixtral's tower: each stands for a patch, and has a token."""
    strategy = hf_config.vision_feature_select_strategy
    if strategy != "full":
        raise CheckpointError(
            f"`vision_feature_select_strategy` of config.json is {strategy!r}; "
            "it must be `full` with a `pixtral` tower"
        )


def cut_patches(pixels: np.ndarray, patch_size: int) -> dict[str, np.ndarray]:
    """Cut a picture, uint8[C, height, width], row by row.

    Returns:
        `pixel_values` uint8[P, C * patch_size**2]: a patch's pixels by channel, row and column;
        `places` int32[P, 2]: the row and the column of each patch.
    """
    channels, height, width = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    patches = pixels.reshape(channels, rows, patch_size, columns, patch_size)
    grid = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    return {
        "pixel_values": patches.transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1),
        "places": np.stack(grid, axis=-1).reshape(-1, 2).astype(np.int32),
    }
