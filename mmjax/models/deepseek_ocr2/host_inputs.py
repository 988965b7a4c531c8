"""The encoder inputs of DeepSeek's OCR models: a unit is an image, a view of its whole and tiles.

Views and tiles have different sizes. So a unit has room for all tiles, of which `encode` computes
those that an image has.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import EncoderSpec, HostInputs, byte_pixels

VIEW_TOKENS, TILE_TOKENS = 256, 144
"""DeepSeek-OCR 2's learned queries of a view and of a tile, which are their embeddings: 16 x 16 and
12 x 12."""
STRIDE = 4
"""Patches, along a side, that SAM makes one state of."""
NEWLINE, SEPARATOR = -1, -2
"""Of `embed_rows`: what stands behind a row of states, and behind an image (`extra_embeds`)."""


class Sides(NamedTuple):
    """Pixels along a side."""

    view: int
    tile: int


class ViewHostInputs(HostInputs):
    """An image's view, its tiles and how many it has."""

    max_tiles: ClassVar[int]
    """As many as the model was trained with (`max_patches` of the image processor)."""
    num_more_rows: ClassVar[int] = 0
    """That the encoder gives behind those of the view."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.sides = sides = self.read_sides(hf_config)
        pixels = STRIDE * hf_config.vision_config.sam_config.patch_size
        self.states = Sides(sides.view // pixels, sides.tile // pixels)
        """SAM's, along a side."""
        num_rows = self.max_tiles * self.states.tile**2 + self.states.view**2
        self.encoder_spec = EncoderSpec(
            inputs={
                **byte_pixels("pixel_values", (3, sides.view, sides.view)),
                # Colours before tiles: `encode` makes pixels of bytes by the first axis.
                "pixel_values_local": ((3, self.max_tiles, sides.tile, sides.tile), "uint8"),
                "num_tiles": ((), "int32"),
            },
            tokens_per_unit=num_rows + self.num_more_rows,
        )

    @staticmethod
    def read_sides(hf_config: Any) -> Sides:
        """Return the sizes of views and tiles; `CheckpointError` where they fit no tower."""
        raise NotImplementedError

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the image as one unit, the tiles that it lacks as zeros."""
        tiles = item["pixel_values_local"].swapaxes(0, 1)
        missing = self.max_tiles - tiles.shape[1]
        padded = np.pad(tiles, ((0, 0), (0, missing), (0, 0), (0, 0)))
        return {
            "pixel_values": item["pixel_values"][None],
            "pixel_values_local": padded[None],
            "num_tiles": np.array([tiles.shape[1]]),
        }


def count_tokens(num_tiles: int) -> int:
    """Return the embeddings of DeepSeek-OCR 2's image, the separator at its end included."""
    return num_tiles * TILE_TOKENS + VIEW_TOKENS + 1


class DeepseekOcr2HostInputs(ViewHostInputs):
    """Of the rows, those of the tiles that an image has, the view's, and the separator."""

    max_tiles = 6
    num_more_rows = 1

    @staticmethod
    def read_sides(hf_config: Any) -> Sides:
        """Return the sizes of views and tiles, of which each state has a query of its own.

        `CheckpointError` where the tower was made for images of another size than the views.
        """
        sam = hf_config.vision_config.sam_config
        pixels = STRIDE * sam.patch_size
        sides = Sides(*(round(count**0.5) * pixels for count in (VIEW_TOKENS, TILE_TOKENS)))
        if sam.image_size != sides.view:
            raise CheckpointError(
                f"`sam_config.image_size` is {sam.image_size} beside patches of {sam.patch_size}; "
                f"the {VIEW_TOKENS} queries of a view ask for {sides.view}"
            )
        return sides

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of the tiles, the view's, and the separator."""
        end = len(item["pixel_values_local"]) * TILE_TOKENS
        view = self.max_tiles * TILE_TOKENS
        rows = [np.arange(end), np.arange(view, count_tokens(self.max_tiles))]
        return np.concatenate(rows).astype(np.int32)


class UnlimitedOcrHostInputs(ViewHostInputs):
    """Of the rows, those of the tiles as they lie in the image, and the view's.

    Behind each row of states is a newline, and a separator at the end.
    """

    max_tiles = 32
    num_extra_rows = 2

    @staticmethod
    def read_sides(hf_config: Any) -> Sides:
        """Return the sizes of views, for which SAM was made, and of tiles: 640 beside 1024."""
        sam = hf_config.vision_config.sam_config
        pixels = STRIDE * sam.patch_size
        sides = Sides(sam.image_size, sam.image_size * 5 // 8)
        if sam.image_size % 8 or any(side % pixels for side in sides):
            raise CheckpointError(
                f"`sam_config.image_size` is {sam.image_size} beside patches of {sam.patch_size}; "
                f"it, and the five eighths of it that a tile has, must be multiples of {pixels}"
            )
        return sides

    def arrange(self, columns: int, rows: int) -> np.ndarray:
        """Return int32[num_embeds] of an image of so many tiles, or of none: as `embed_rows`."""
        view, tile = self.states.view, self.states.tile
        start = self.max_tiles * tile**2
        places = np.arange(columns * rows * tile**2).reshape(rows, columns, tile, tile)
        parts = [
            places.swapaxes(1, 2).reshape(rows * tile, columns * tile),
            np.arange(start, start + view**2).reshape(view, view),
        ]
        lines = [np.pad(one, ((0, 0), (0, 1)), constant_values=NEWLINE) for one in parts]
        flat = [one.reshape(-1) for one in (lines if columns * rows else lines[1:])]
        return np.concatenate([*flat, [SEPARATOR]]).astype(np.int32)

    def count_tokens(self, columns: int, rows: int) -> int:
        """Return the embeddings of an image of so many tiles, newlines and separator included."""
        view, tile = self.states.view, self.states.tile
        return rows * tile * (columns * tile + 1) + view * (view + 1) + 1

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of the tiles, line by line, the view's, and the separator."""
        columns, rows = item["patches_grid"].tolist()
        return self.arrange(columns, rows) if item["num_local_patches"] else self.arrange(0, 0)


class DeepseekOcrHostInputs(UnlimitedOcrHostInputs):
    """The same of fewer tiles."""

    max_tiles = 9
