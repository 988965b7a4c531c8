"""LLaVA-1.5's encoder inputs: a picture is a unit of one size, or packed patches (Pixtral)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import EncoderSpec, HostInputs, PackedEncoderSpec, byte_pixels

_NUM_EXTRA_FEATURES: Mapping[str, int] = MappingProxyType(
    {"clip_vision_model": 1, "siglip_vision_model": 0}
)
"""Features of a tower that stand for no patch (CLIP's class token), by its `model_type`."""


def count_extra_features(hf_config: Any) -> int:
    """Return how many of the tower's features stand for no patch; they come first."""
    tower = hf_config.vision_config.model_type
    if tower not in _NUM_EXTRA_FEATURES:
        known = ", ".join(f"`{name}`" for name in (*_NUM_EXTRA_FEATURES, "pixtral"))
        raise CheckpointError(
            f"`vision_config.model_type` is `{tower}`; LLaVA is served with one of {known}"
        )
    return _NUM_EXTRA_FEATURES[tower]


def choose_features(num_features: int, strategy: str) -> slice:
    """Return which of a tower's features `vision_feature_select_strategy` leaves."""
    # "default" drops the first feature of any tower, also where that is a patch.
    kept = {"default": slice(1, None), "full": slice(None), "class": slice(0, 1)}
    if strategy not in kept:
        raise CheckpointError(
            f"`vision_feature_select_strategy` of config.json is {strategy!r}; "
            f"it must be one of {', '.join(kept)}"
        )
    return slice(*kept[strategy].indices(num_features))


def count_kept_features(num_features: int, strategy: str) -> int:
    """Return how many of a tower's features `vision_feature_select_strategy` leaves."""
    kept = choose_features(num_features, strategy)
    return kept.stop - kept.start


def count_image_tokens(hf_config: Any) -> int:
    """Return how many embeddings a picture has: the features of the tower that are kept."""
    vision = hf_config.vision_config
    num_patches = (vision.image_size // vision.patch_size) ** 2
    return count_kept_features(
        num_patches + count_extra_features(hf_config), hf_config.vision_feature_select_strategy
    )


class LlavaHostInputs(HostInputs):
    """Units of one size; packed patches before Pixtral's tower."""

    encoder_spec: EncoderSpec | PackedEncoderSpec

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision = hf_config.vision_config
        if has_pixtral_tower(hf_config):
            check_whole_pictures(hf_config)
            width = vision.num_channels * vision.patch_size**2
            self.encoder_spec = PackedEncoderSpec(
                inputs={**byte_pixels("pixel_values", (width,)), "places": ((2,), "int32")},
                patches_per_token=1,
            )
            return
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        self.encoder_spec = EncoderSpec(
            inputs=byte_pixels("pixel_values", shape),
            tokens_per_unit=count_image_tokens(hf_config),
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the picture as `[1, C, Y, X]`, or its patches and their places."""
        pixels = item["pixel_values"]
        if isinstance(self.encoder_spec, PackedEncoderSpec):
            return cut_patches(pixels, self.hf_config.vision_config.patch_size)
        return {"pixel_values": pixels[None]}


def has_pixtral_tower(hf_config: Any) -> bool:
    """Return whether the tower takes pictures of any size, and a prompt marks their rows' ends."""
    return hf_config.vision_config.model_type == "pixtral"


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
