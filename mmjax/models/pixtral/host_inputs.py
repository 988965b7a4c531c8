"""Pixtral's encoder inputs: packed patches of pictures of any size."""

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


class PixtralHostInputs(HostInputs):
    """Patches with their places; each gives an embedding, or each square of them."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        check_whole_pictures(hf_config)
        vision = hf_config.vision_config
        width = vision.num_channels * vision.patch_size**2
        self.merge_size = read_merge_size(hf_config)
        squares = {"square_offsets": ((), "int32")} if self.merge_size > 1 else {}
        self.encoder_spec = PackedEncoderSpec(
            inputs={**byte_pixels("pixel_values", (width,)), "places": ((2,), "int32"), **squares},
            patches_per_token=self.merge_size**2,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the picture's patches, their places, and what brings them into squares."""
        units = cut_patches(item["pixel_values"], self.hf_config.vision_config.patch_size)
        if self.merge_size == 1:
            return units
        rows, columns = (int(last) + 1 for last in units["places"][-1])
        return {**units, "square_offsets": find_square_offsets(rows, columns, self.merge_size)}


def read_merge_size(hf_config: Any) -> int:
    """Return the side of the square of patches that is one embedding: 1 where LLaVA wraps it."""
    size = getattr(hf_config, "spatial_merge_size", 1)
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(
            f"`spatial_merge_size` of config.json is {size!r}; expected 1 or a larger whole number"
        )
    return size


def check_whole_pictures(hf_config: Any) -> None:
    """Refuse to drop a feature of Pixtral's tower: each stands for a patch, and has a token."""
    strategy = getattr(hf_config, "vision_feature_select_strategy", "full")
    if strategy != "full":
        raise CheckpointError(
            f"`vision_feature_select_strategy` of config.json is {strategy!r}; "
            "it must be `full` with a `pixtral` tower"
        )


def cut_patches(pixels: np.ndarray, patch_size: int) -> dict[str, np.ndarray]:
    """Cut a picture, uint8[C, height, width], row by row.

    Returns:
        `pixel_values` uint8[P, C * patch_size**2]: a patch's pixels by channel, row and column;
        `places` int[P, 2]: the row and the column of each patch.
    """
    channels, height, width = pixels.shape
    rows, columns = height // patch_size, width // patch_size
    patches = pixels.reshape(channels, rows, patch_size, columns, patch_size)
    return {
        "pixel_values": patches.transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1),
        "places": find_places(rows, columns, 1),
    }
