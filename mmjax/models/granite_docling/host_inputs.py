"""Granite for Docling's encoder inputs: every tile of a page is a unit, and so is the whole."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs

FINE = 4
"""Embeddings of the fine route for each of the coarse one's: squares of half the side."""


class GraniteDoclingHostInputs(UnitHostInputs):
    """Units of one size. The encoder gives a unit's rows by the coarse route, then by the fine one.

    So requests of both routes share its calls: an item's embeddings are the rows of its own route.
    """

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.num_coarse = count_coarse(hf_config)
        """Embeddings of a unit by the coarse route."""
        self.fed_layers = tuple(range(1, 1 + len(read_states(hf_config))))

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        shape, _ = UnitHostInputs.read_unit(hf_config)
        coarse = count_coarse(hf_config)
        return shape, coarse * (1 + FINE) if hf_config.vision_config.use_fine_route else coarse

    def count_tile_tokens(self, is_fine: bool) -> int:
        """Return how many embeddings a tile has."""
        return self.num_coarse * FINE if is_fine else self.num_coarse

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of the item's route, tile by tile."""
        *_, is_fine = item["image_layouts"].tolist()
        first, number = self.num_coarse * is_fine, self.count_tile_tokens(bool(is_fine))
        _, num_rows = self.read_unit(self.hf_config)
        tiles = np.arange(len(item["pixel_values"]))[:, None] * num_rows
        return (tiles + np.arange(first, first + number)).reshape(-1).astype(np.int32)


def count_coarse(hf_config: Any) -> int:
    """Return how many embeddings a tile has by the coarse route; `CheckpointError` for no squares.

    The fine route's squares are of half as many patches a side.
    """
    vision, factor = hf_config.vision_config, hf_config.vision_config.scale_factor
    _, num_patches = UnitHostInputs.read_unit(hf_config)
    side = math.isqrt(num_patches)
    if factor < 1 or side % factor or (vision.use_fine_route and factor % 2):
        raise CheckpointError(
            f"`vision_config.scale_factor` is {factor}; it must divide the {side} patches of a "
            "tile's side, and be even where there is a fine route (`use_fine_route`)"
        )
    return num_patches // factor**2


def read_states(hf_config: Any) -> tuple[int, ...]:
    """Return which states of the tower feed the decoder: n is the output of block n - 1.

    They are added behind the decoder's first layers, one behind each.
    """
    vision = hf_config.vision_config
    given, num_blocks = list(vision.deepstack_visual_indexes), vision.num_hidden_layers
    num_layers = hf_config.get_text_config().num_hidden_layers
    is_known = all(0 <= block < num_blocks for block in given)
    if not is_known or given != sorted({*given}) or len(given) > num_layers:
        raise CheckpointError(
            f"`vision_config.deepstack_visual_indexes` is {given}; give blocks of the tower, from "
            f"0 to {num_blocks - 1}, each behind the one before, and no more than the decoder's "
            f"{num_layers} layers"
        )
    return tuple(block + 1 for block in given)
