"""LLaVA's encoder inputs: a picture is a unit of one size, LLaVA-NeXT's the whole and its tiles."""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import (
    NEWLINE,
    PackedEncoderSpec,
    UnitHostInputs,
    byte_pixels,
    choose_features,
    end_lines,
    number_cells,
)
from mmjax.models.llava.anyres import arrange, find_kept, read_canvases, resample
from mmjax.models.llava.granite4_config import read_fed_layers, read_window
from mmjax.processing.image_processors.image import patchify
from mmjax.processing.image_processors.tiling import choose_resolution
from mmjax.processing.items.items import ImageSize
from mmjax.rounding import cdiv

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


def count_image_tokens(hf_config: Any) -> int:
    """Return how many embeddings a picture has: the features of the tower that are kept."""
    vision = hf_config.vision_config
    num_patches = (vision.image_size // vision.patch_size) ** 2
    num_features = num_patches + count_extra_features(hf_config)
    kept = choose_features(num_features, hf_config.vision_feature_select_strategy)
    return kept.stop - kept.start


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
        self.tile_side = self.count_side(hf_config)
        """Embeddings along its side."""
        found, expected = count_image_tokens(hf_config), self.tile_patches**2
        if found != expected:
            strategy = hf_config.vision_feature_select_strategy
            raise CheckpointError(
                f"`vision_feature_select_strategy` `{strategy}` leaves {found} features of a tile; "
                f"rows of tiles are made of its {expected} patches, no more and no fewer"
            )

    @staticmethod
    def count_side(hf_config: Any) -> int:
        """Return how many embeddings lie along a tile's side: here one for each patch."""
        return hf_config.vision_config.image_size // hf_config.vision_config.patch_size

    def count_tiles(self, size: ImageSize) -> tuple[int, int]:
        """Return the rows and columns of tiles that a picture is cut into."""
        canvas = choose_resolution(size, self.canvases)
        return canvas.height // self.tile, canvas.width // self.tile

    def arrange(self, size: ImageSize) -> np.ndarray:
        """Return int32[num_embeds] of a picture, as `embed_rows`."""
        return arrange(size, self.count_tiles(size), self.tile_side)

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the patches of the whole, and those of the tiles that are no padding, by lines."""
        height, width = item["image_sizes"].tolist()
        return self.arrange(ImageSize(width=width, height=height))


class Granite4VisionHostInputs(LlavaNextHostInputs):
    """LLaVA-NeXT's tiles, whose windows of patches become fewer embeddings.

    What an embedding is made of is fed to several layers of the decoder; the embedding itself is 0.
    """

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.fed_layers = read_fed_layers(hf_config)

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        shape, _ = LlavaHostInputs.read_unit(hf_config)
        return shape, Granite4VisionHostInputs.count_side(hf_config) ** 2

    @staticmethod
    def count_side(hf_config: Any) -> int:
        """Return how many embeddings lie along a tile's side: queries of its windows."""
        query_side, window_side = read_window(hf_config)
        return LlavaNextHostInputs.count_side(hf_config) // window_side * query_side


class Layout(NamedTuple):
    """Of what an item's embeddings are made."""

    taps: np.ndarray
    """int32[embeddings, 4]: patches, counted over the item's tiles or frames."""
    weights: np.ndarray
    """float32[embeddings, 4]."""
    embed_rows: np.ndarray
    """int32: the embeddings in order, and newlines among them."""


_TAPS = 4
_NEAR = 1.1
"""How often more patches a side than `vision_aspect_ratio` allows are kept as they are."""


class LlavaOnevisionHostInputs(LlavaNextHostInputs):
    """LLaVA-NeXT's tiles, behind each other in a pack, and frames of videos as tiles.

    Embeddings may be mixed of patches on both sides of a seam, so that an item is encoded whole.
    """

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.patch_size = hf_config.vision_config.patch_size
        self.tile_rows = 1 << (self.tile_patches**2 - 1).bit_length()
        """Of the pack; those behind the patches are padding."""
        self.most_patches = _read_most_tiles(hf_config) * self.tile_patches**2
        self.pooled_side = cdiv(self.tile_patches, 2)
        """Embeddings along a frame's side."""
        self.encoder_spec = PackedEncoderSpec(
            inputs={
                **byte_pixels("pixel_values", (3 * self.patch_size**2,)),
                "taps": ((_TAPS,), "int32"),
                "tap_weights": ((_TAPS,), "float32"),
            },
            patches_per_token=1,
            patches_per_crop=self.tile_rows,
            # Of a video; a picture has fewer but where a line of tiles is a thin one.
            patches_per_kept=cdiv(self.tile_rows, self.pooled_side**2),
        )

    def lay_out(self, size: ImageSize, num_tiles: int) -> Layout:
        """Return what a picture is made of; of one tile, it is not cut."""
        if num_tiles == 1:
            cells = np.arange(self.tile_patches**2)
            return Layout(*_as_is(cells), np.append(cells, NEWLINE).astype(np.int32))
        return _lay_out(size, self.count_tiles(size), self.tile_patches, self.most_patches)

    def lay_out_video(self, num_frames: int) -> Layout:
        """Return what a video is made of: each frame is pooled, and one newline ends it."""
        side = self.tile_patches
        cells = np.arange(side**2).reshape(side, side)
        taps, weights = resample(cells, self.pooled_side, self.pooled_side)
        first = (np.arange(num_frames) * side**2)[:, None, None]
        taps = (taps + first).reshape(-1, _TAPS).astype(np.int32)
        rows = np.array([*range(len(taps)), NEWLINE], np.int32)
        return Layout(taps, np.tile(weights, (num_frames, 1)), rows)

    def count_embeds(self, size: ImageSize) -> int:
        """Return how many embeddings a picture has that is cut, newlines included."""
        tiles, side = self.count_tiles(size), self.tile_patches
        whole = (tiles[0] * side, tiles[1] * side)
        rows, columns = (one.stop - one.start for one in find_kept(size, *whole))
        rows, columns = count_lines(rows, columns, self.most_patches)
        return side**2 + rows * (columns + 1)

    def find_largest(self) -> ImageSize:
        """Return the size of a picture with the most embeddings.

        Of pictures as long as a canvas on one side, and of any number of patches on the other: what
        fills a large canvas may be mixed to fewer than a part of it has.
        """
        sizes = list(self.canvases)
        for canvas in self.canvases:
            for side in range(1, canvas.height * self.tile_patches // self.tile):
                sizes.append(canvas._replace(height=cdiv(side * self.tile, self.tile_patches)))
            for side in range(1, canvas.width * self.tile_patches // self.tile):
                sizes.append(canvas._replace(width=cdiv(side * self.tile, self.tile_patches)))
        return max(dict.fromkeys(sizes), key=self.count_embeds)

    def find_layout(self, item: Mapping[str, np.ndarray]) -> Layout:
        """Return what an item is made of, by its tensors."""
        if "pixel_values_videos" in item:
            return self.lay_out_video(len(item["pixel_values_videos"]))
        height, width = item["image_sizes"].tolist()
        return self.lay_out(ImageSize(width=width, height=height), len(item["pixel_values"]))

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of all tiles with their padding, and what each embedding is made of.

        `taps` int32[rows, 4], `tap_weights` float32[rows, 4]: of the row's embedding, rows counted
        from the item's first.
        """
        pixels = item["pixel_values_videos" if "pixel_values_videos" in item else "pixel_values"]
        whole, patches = self.tile_patches * self.patch_size, self.tile_patches**2
        tiles = [
            patchify(tile[:, :whole, :whole], *[self.patch_size] * 2, colours_first=True)
            for tile in pixels
        ]
        padded = np.pad(tiles, ((0, 0), (0, self.tile_rows - patches), (0, 0)))
        layout, num_rows = self.find_layout(item), len(tiles) * self.tile_rows
        taps = layout.taps // patches * self.tile_rows + layout.taps % patches
        behind = ((0, num_rows - len(taps)), (0, 0))
        return {
            "pixel_values": padded.reshape(num_rows, -1),
            "taps": np.pad(taps, behind),
            "tap_weights": np.pad(layout.weights, behind),
        }

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the embeddings, and the newlines among them."""
        return self.find_layout(item).embed_rows


def _read_most_tiles(hf_config: Any) -> int:
    """Return of how many tiles a picture's patches may be, before they are mixed to fewer."""
    found = re.fullmatch(r"anyres_max_(\d+)", str(hf_config.vision_aspect_ratio))
    if found is None or not int(found[1]):
        raise CheckpointError(
            f"`vision_aspect_ratio` of config.json is {hf_config.vision_aspect_ratio!r}; it must "
            "be `anyres_max_` and a number of tiles, as in `anyres_max_9`"
        )
    return int(found[1])


def count_lines(rows: int, columns: int, most_patches: int) -> tuple[int, int]:
    """Return how many rows and columns are made of so many, which may be the same."""
    ratio = math.sqrt(rows * columns / most_patches)
    return (int(rows // ratio), int(columns // ratio)) if ratio > _NEAR else (rows, columns)


def _as_is(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the taps and weights of embeddings that are patches as they are, as `resample`."""
    taps = np.repeat(cells.reshape(-1, 1), _TAPS, axis=1).astype(np.int32)
    return taps, np.eye(1, _TAPS, dtype=np.float32).repeat(len(taps), axis=0)


@lru_cache(maxsize=64)
def _lay_out(size: ImageSize, tiles: tuple[int, int], side: int, most_patches: int) -> Layout:
    cells = side**2 + number_cells(tiles, side)
    kept = cells[find_kept(size, *cells.shape)]
    rows, columns = count_lines(kept.shape[0], kept.shape[1], most_patches)
    of_lines = _as_is(kept) if (rows, columns) == kept.shape else resample(kept, rows, columns)
    parts = zip(_as_is(np.arange(side**2)), of_lines, strict=True)
    taps, weights = (np.concatenate(pair) for pair in parts)
    lines = side**2 + np.arange(rows * columns).reshape(rows, columns)
    embed_rows = np.concatenate([np.arange(side**2), end_lines(lines)])
    return Layout(taps, weights, embed_rows.astype(np.int32))
