"""Idefics3's encoder inputs: every tile, every whole picture and every frame is a unit."""

from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs


class Idefics3HostInputs(UnitHostInputs):
    """Units of one size, with as many embeddings each."""

    pixel_keys = ("pixel_values", "pixel_values_videos")

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        vision, factor = hf_config.vision_config, hf_config.scale_factor
        side, patch_size = vision.image_size, vision.patch_size
        if not isinstance(side, int) or not isinstance(patch_size, int):
            raise CheckpointError(
                f"`vision_config` has `image_size` {side} and `patch_size` {patch_size}; tiles and "
                "patches are squares: give one number each"
            )
        if factor < 1 or (side // patch_size) % factor:
            raise CheckpointError(
                f"`scale_factor` is {factor}; it must divide the {side // patch_size} patches of a "
                "tile's side"
            )
        return (vision.num_channels, side, side), (side // patch_size // factor) ** 2
