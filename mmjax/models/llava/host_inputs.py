"""LLaVA-1.5's encoder inputs: a picture is a unit of one size."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs, choose_features

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


class LlavaHostInputs(UnitHostInputs):
    """Units of one size."""

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        shape, _ = UnitHostInputs.read_unit(hf_config)
        return shape, count_image_tokens(hf_config)
