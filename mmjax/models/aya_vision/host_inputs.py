"""Aya Vision's encoder inputs: every tile of a picture is a unit."""

from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs


class AyaVisionHostInputs(UnitHostInputs):
    """Tiles of one size; an embedding is a square of `downsample_factor` patches a side."""

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        vision, factor = hf_config.vision_config, hf_config.downsample_factor
        side = vision.image_size // vision.patch_size
        if factor < 1 or side % factor:
            raise CheckpointError(
                f"`downsample_factor` is {factor}; it must divide the {side} patches of a tile's "
                "side"
            )
        return (vision.num_channels, vision.image_size, vision.image_size), (side // factor) ** 2
