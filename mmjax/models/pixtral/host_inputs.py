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
from mmjax.processing.image_processors.image import patchify


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
        pixels, size = item["pixel_values"], self.hf_config.vision_config.patch_size
        rows, columns = (side // size for side in pixels.shape[1:])
        units = {
            "pixel_values": patchify(pixels, size, size, colours_first=True),
            "places": find_places(rows, columns, 1),
        }
        if self.merge_size > 1:
            units["square_offsets"] = find_square_offsets(rows, columns, self.merge_size)
        return units


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
