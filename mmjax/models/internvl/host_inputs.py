"""InternVL's encoder inputs: every tile of a picture and every frame of a video is a unit."""

from collections.abc import Mapping
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs

PIXEL_KEYS: Mapping[str, Mapping[str, str]] = {
    "original": {"image": "pixel_values_flat", "video": "pixel_values_flat_video"},
    "hf": {"image": "pixel_values", "video": "pixel_values_videos"},
}
"""By layout and modality, the name of an item's tiles, uint8[tiles, C, Y, X]."""


def only_side(size: Any, name: str) -> int:
    """Return the side of a square, which configurations write as one number or as two."""
    sides = set(size) if isinstance(size, list | tuple) else {size}
    if len(sides) != 1:
        raise CheckpointError(
            f"`{name}` of config.json's vision_config is {size}; tiles are square"
        )
    return sides.pop()


def patches_per_side(hf_config: Any) -> int:
    """Return how many patches a tile has along a side."""
    vision = hf_config.vision_config
    image_size = only_side(vision.image_size, "image_size")
    return image_size // only_side(vision.patch_size, "patch_size")


def shuffle_factor(hf_config: Any) -> int:
    """Return the side of the square of patches that becomes one embedding (`downsample_ratio`)."""
    ratio, side = hf_config.downsample_ratio, patches_per_side(hf_config)
    factor = round(1 / ratio) if 0 < ratio <= 1 else 0
    if factor and factor * ratio == 1 and side % factor == 0:
        return factor
    raise CheckpointError(
        f"`downsample_ratio` is {ratio}; it must be 1 / n, where n divides the {side} patches of a "
        "tile's side"
    )


class InternVLHostInputs(UnitHostInputs):
    """Units of one size, with as many embeddings each; of either layout."""

    pixel_keys = tuple(name for keys in PIXEL_KEYS.values() for name in keys.values())

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        vision = hf_config.vision_config
        side = only_side(vision.image_size, "image_size")
        num_tokens = (patches_per_side(hf_config) // shuffle_factor(hf_config)) ** 2
        return (getattr(vision, "num_channels", 3), side, side), num_tokens
