"""Llama 3.2 Vision's encoder inputs: a unit is a picture with room for all of its tiles."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import EncoderSpec, HostInputs, byte_pixels

MAX_IMAGES = 4
"""In a prompt: every step of a prompt has room for the rows of as many. The published checkpoints
were tuned for conversations about one."""

NUM_MORE_TOKENS = 8
"""Rows of the table of tokens behind the vocabulary: they are read and have no logits (HF)."""


class MllamaHostInputs(HostInputs):
    """A picture's tiles, `pixel_values` uint8[tiles, C, Y, X], and which arrangement they have.

    The tower is given them one below the other, uint8[C, tiles * Y, X], behind them zeros in place
    of tiles that there are not; tokens attend to the rows of those that there are.
    """

    attends_to_items = True

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision = hf_config.vision_config
        if not isinstance(vision.image_size, int) or not isinstance(vision.patch_size, int):
            raise CheckpointError(
                f"`vision_config.image_size` and `patch_size` are {vision.image_size} and "
                f"{vision.patch_size}; each must be one number, the side of a square"
            )
        self.max_num_tiles = vision.max_num_tiles
        self.tile_shape = (vision.num_channels, vision.image_size, vision.image_size)
        self.rows_per_tile = (vision.image_size // vision.patch_size) ** 2 + 1
        channels, height, width = self.tile_shape
        shape = (channels, height * self.max_num_tiles, width)
        self.encoder_spec = EncoderSpec(
            inputs={**byte_pixels("pixel_values", shape), "aspect_ratio_ids": ((), "int32")},
            tokens_per_unit=self.max_num_tiles * self.rows_per_tile,
        )
        self.max_encoder_len = MAX_IMAGES * self.encoder_spec.tokens_per_unit

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the picture as one unit."""
        tiles = item["pixel_values"]
        padded = np.zeros((self.max_num_tiles, *self.tile_shape), tiles.dtype)
        padded[: len(tiles)] = tiles
        below = padded.transpose(1, 0, 2, 3).reshape(1, self.tile_shape[0], -1, tiles.shape[-1])
        return {"pixel_values": below, "aspect_ratio_ids": item["aspect_ratio_ids"][None]}

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of the picture's own tiles, which come first."""
        return np.arange(len(item["pixel_values"]) * self.rows_per_tile, dtype=np.int32)
