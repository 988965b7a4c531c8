"""LLaVA-1.5's encoder inputs: every picture is a unit, and has as many embeddings as any."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import EncoderSpec, HostInputs

_NUM_EXTRA_FEATURES: Mapping[str, int] = MappingProxyType(
    {"clip_vision_model": 1, "siglip_vision_model": 0}
)
"""Features of a tower that stand for no patch (CLIP's class token), by its `model_type`."""


def count_extra_features(hf_config: Any) -> int:
    """Return how many of the tower's features stand for no patch; they come first."""
    tower = hf_config.vision_config.model_type
    if tower not in _NUM_EXTRA_FEATURES:
        known = ", ".join(f"`{name}`" for name in _NUM_EXTRA_FEATURES)
        raise CheckpointError(
            f"the vision tower is a `{tower}`; LLaVA is served with one of {known}"
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
    """Units of one size."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision = hf_config.vision_config
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        self.encoder_spec = EncoderSpec(
            inputs={"pixel_values": (shape, "float32")},
            tokens_per_unit=count_image_tokens(hf_config),
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the picture as `[1, C, Y, X]`."""
        return {"pixel_values": item["pixel_values"][None]}
