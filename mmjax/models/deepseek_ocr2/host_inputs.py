"""DeepSeek-OCR 2's encoder inputs: a unit is an image, a view of its whole and up to six tiles.

Views and tiles have different sizes. So a unit has room for all tiles, of which `encode` computes
those that an image has.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import EncoderSpec, HostInputs, byte_pixels

MAX_TILES = 6
"""As many as the model was trained with (`max_patches` of the image processor)."""
VIEW_TOKENS, TILE_TOKENS = 256, 144
"""Learned queries of a view and of a tile, which are their embeddings: 16 x 16 and 12 x 12."""
STRIDE = 4
"""Patches, along a side, that the tower makes one state of."""


class Sides(NamedTuple):
    """Pixels along a side."""

    view: int
    tile: int


def read_sides(hf_config: Any) -> Sides:
    """Return the sizes of views and tiles, of which each state has a query of its own.

    `CheckpointError` where the tower was made for images of another size than the views.
    """
    sam = hf_config.vision_config.sam_config
    pixels = STRIDE * sam.patch_size
    sides = Sides(*(round(count**0.5) * pixels for count in (VIEW_TOKENS, TILE_TOKENS)))
    if sam.image_size != sides.view:
        raise CheckpointError(
            f"`sam_config.image_size` is {sam.image_size} beside patches of {sam.patch_size}; the "
            f"{VIEW_TOKENS} queries of a view ask for {sides.view}"
        )
    return sides


def count_tokens(num_tiles: int) -> int:
    """Return the embeddings of an image, the separator at its end included."""
    return num_tiles * TILE_TOKENS + VIEW_TOKENS + 1


class DeepseekOcr2HostInputs(HostInputs):
    """An image's view, its tiles and how many it has; of the rows, those that it has."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        sides = read_sides(hf_config)
        self.encoder_spec = EncoderSpec(
            inputs={
                **byte_pixels("pixel_values", (3, sides.view, sides.view)),
                # Colours before tiles: `encode` makes pixels of bytes by the first axis.
                "pixel_values_local": ((3, MAX_TILES, sides.tile, sides.tile), "uint8"),
                "num_tiles": ((), "int32"),
            },
            tokens_per_unit=count_tokens(MAX_TILES),
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the image as one unit, the tiles that it lacks as zeros."""
        tiles = item["pixel_values_local"].swapaxes(0, 1)
        missing = MAX_TILES - tiles.shape[1]
        padded = np.pad(tiles, ((0, 0), (0, missing), (0, 0), (0, 0)))
        return {
            "pixel_values": item["pixel_values"][None],
            "pixel_values_local": padded[None],
            "num_tiles": np.array([tiles.shape[1]]),
        }

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of the tiles, the view's, and the separator."""
        end = len(item["pixel_values_local"]) * TILE_TOKENS
        view = MAX_TILES * TILE_TOKENS
        rows = [np.arange(end), np.arange(view, count_tokens(MAX_TILES))]
        return np.concatenate(rows).astype(np.int32)
