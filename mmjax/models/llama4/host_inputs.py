"""Llama 4's encoder inputs: every tile of a picture, and the whole of it, is a unit."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs

ArrayT = TypeVar("ArrayT", bound=Any)


def find_factor(vision: Any) -> int:
    """Return how many patches a side of a square has that becomes one embedding."""
    ratio, side = vision.pixel_shuffle_ratio, vision.image_size // vision.patch_size
    factor = round(1 / ratio)
    if factor < 1 or factor * ratio != 1 or side % factor:
        raise CheckpointError(
            f"`vision_config.pixel_shuffle_ratio` is {ratio}; it must be one over a number that "
            f"divides the {side} patches of a tile's side"
        )
    return factor


class Llama4HostInputs(UnitHostInputs):
    """Tiles of one size; an embedding is a square of patches (`pixel_shuffle_ratio`)."""

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        shape, num_patches = UnitHostInputs.read_unit(hf_config)
        return shape, num_patches // find_factor(hf_config.vision_config) ** 2


def normalize(pixels: ArrayT, round_off: Callable[[ArrayT], ArrayT]) -> ArrayT:
    """Return pixels of 0 to 255 as HF's image processor has them: from -1 to 1, in bfloat16.

    It rounds behind each step, so that this is no affine map. `pixels`: float32, of numpy or jax;
    `round_off` rounds to bfloat16, and leaves the dtype.
    """
    scaled = round_off(pixels * np.float32(1 / 255))
    return round_off(scaled - np.float32(0.5)) * np.float32(2)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, of two to the even one; float32."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)
