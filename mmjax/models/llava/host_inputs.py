"""LLaVA's encoder inputs: a picture is a unit of one size, LLaVA-NeXT's the whole and its tiles."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs, choose_features
from mmjax.models.llava.anyres import arrange, choose_canvas, read_canvases
from mmjax.processing.items.items import ImageSize

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


class LlavaNextHostInputs(LlavaHostInputs):
    """The whole of a picture, and the tiles of its canvas, row by row."""

    num_extra_rows = 1

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.canvases = read_canvases(hf_config)
        self.tile = hf_config.vision_config.image_size
        """Pixels along its side."""
        self.tile_patches = self.tile // hf_config.vision_config.patch_size
        (_, found), expected = self.read_unit(hf_config), self.tile_patches**2
        if found != expected:
            strategy = hf_config.vision_feature_select_strategy
            raise CheckpointError(
                f"`vision_feature_select_strategy` `{strategy}` leaves {found} features of a tile; "
                f"rows of tiles are made of its {expected} patches, no more and no fewer"
            )

    def count_tiles(self, size: ImageSize) -> tuple[int, int]:
        """Return the rows and columns of tiles that a picture is cut into."""
        canvas = choose_canvas(size, self.canvases)
        return canvas.height // self.tile, canvas.width // self.tile

    def arrange(self, size: ImageSize) -> np.ndarray:
        """Return int32[num_embeds] of a picture, as `embed_rows`."""
        return arrange(size, self.count_tiles(size), self.tile_patches)

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the patches of the whole, and those of the tiles that are no padding, by lines."""
        height, width = item["image_sizes"].tolist()
        return self.arrange(ImageSize(width=width, height=height))
