"""The encoder inputs of DeepSeek's OCR models: a unit is an image, a view of its whole and tiles.

Views and tiles have different sizes. So a unit has room for all tiles, of which `encode` computes
those that an image has.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import EncoderSpec, HostInputs, byte_pixels, end_lines, number_cells

VIEW_TOKENS, TILE_TOKENS = 256, 144
"""DeepSeek-OCR 2's learned queries of a view and of a tile, which are their embeddings: 16 x 16 and
12 x 12."""
STRIDE = 4
"""Patches, along a side, that SAM makes one state of."""


class Sides(NamedTuple):
    """Pixels along a side."""

    view: int
    tile: int

    @property
    def settings(self) -> dict[str, Any]:
        """The same, as HF's image processors have it."""
        return {"size": {"height": self.view, "width": self.view}, "tile_size": self.tile}


class ViewHostInputs(HostInputs):
    """An image's view, its tiles and how many it has; a separator stands behind its embeddings."""

    max_tiles: ClassVar[int]
    """As many as the model was trained with (`max_patches` of the image processor)."""
    write_cells: ClassVar[Callable[[np.ndarray], np.ndarray]]
    """Writes int[rows, columns] of states, by their numbers, as they stand among embeddings."""
    num_extra_rows = 1

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.sides = sides = self.read_sides(hf_config)
        pixels = STRIDE * hf_config.vision_config.sam_config.patch_size
        self.states = Sides(sides.view // pixels, sides.tile // pixels)
        """SAM's, along a side."""
        self.encoder_spec = EncoderSpec(
            inputs={
                **byte_pixels("pixel_values", (3, sides.view, sides.view)),
                # Colours before tiles: `encode` makes pixels of bytes by the first axis.
                "pixel_values_local": ((3, self.max_tiles, sides.tile, sides.tile), "uint8"),
                "num_tiles": ((), "int32"),
            },
            tokens_per_unit=self.max_tiles * self.states.tile**2 + self.states.view**2,
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

    def arrange(self, columns: int, rows: int) -> np.ndarray:
        """Return int32[num_embeds] of an image of so many tiles, or of none: as `embed_rows`."""
        tiles = number_cells((rows, columns), self.states.tile)
        view = self.max_tiles * self.states.tile**2 + number_cells((1, 1), self.states.view)
        parts = [self.write_cells(tiles), self.write_cells(view), [-self.num_extra_rows]]
        return np.concatenate(parts).astype(np.int32)

    def count_tokens(self, columns: int, rows: int) -> int:
        """Return how many embeddings such an image has."""
        return len(self.arrange(columns, rows))

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of the tiles, one behind the other, the view's, and the separator."""
        return self.arrange(1, int(item["num_local_patches"]))


class DeepseekOcr2HostInputs(ViewHostInputs):
    """Of the rows, those of the tiles that an image has, and the view's."""

    max_tiles = 6
    write_cells = staticmethod(np.ravel)

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


class DeepseekOcrHostInputs(ViewHostInputs):
    """Of the rows, those of the tiles as they lie in the image, and the view's.

    Behind each line of states is a newline.
    """

    max_tiles = 9
    write_cells = staticmethod(end_lines)
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

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of the tiles, line by line, the view's, and the separator."""
        columns, rows = item["patches_grid"].tolist()
        return self.arrange(columns, rows) if item["num_local_patches"] else self.arrange(0, 0)


class UnlimitedOcrHostInputs(DeepseekOcrHostInputs):
    """The same of more tiles."""

    max_tiles = 32
