"""Idefics3's encoder inputs: every tile, every whole picture and every frame is a unit."""

import math
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs


class Idefics3HostInputs(UnitHostInputs):
    """Units of one size, with as many embeddings each."""

    pixel_keys = ("pixel_values", "pixel_values_videos")

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        vision, factor = hf_config.vision_config, hf_config.scale_factor
        shape, num_patches = UnitHostInputs.read_unit(hf_config)
        side = math.isqrt(num_patches)
        if factor < 1 or side % factor:
            raise CheckpointError(
                f"`scale_factor` is {factor}; it must divide the {side} patches of a tile's side"
            )
        if not has_own_positions(side):
            raise CheckpointError(
                f"`image_size` {vision.image_size} and `patch_size` {vision.patch_size} of "
                f"`vision_config` give tiles of {side} patches a side, whose positions HF's "
                "float32 rounds otherwise on each kind of device; published are 26, 27 and 32"
            )
        return shape, num_patches // factor**2


def has_own_positions(side: int) -> bool:
    """Return whether each of `side` patches has the position of its number, whatever rounds it.

    HF looks for i * (1 / side) among the multiples of 1 / side (`Idefics3VisionEmbeddings`), which
    `torch.arange` rounds by vectors of a device's width, or one by one.
    """
    step, index = 1 / side, np.arange(side - 1)
    places = (index + 1).astype(np.float32) * np.float32(step)
    for width in (1, 4, 8, 16):
        firsts = np.float32(step + index // width * width * step).astype(np.float64)
        if (places < (firsts + index % width * step).astype(np.float32)).any():
            return False
    return True
