"""Molmo's crops: the whole image once, and overlapping windows over an enlarged one.

As the published `MolmoImageProcessor` (arXiv 2409.17146), in numpy and Pillow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from mmjax.errors import RequestValueError
from mmjax.processing.image_processors.crops import Grid, OverlappingCrops
from mmjax.processing.items.items import ImageSize

DROPPED = -100
"""Stands in `image_input_idx` for an embedding that no token takes."""
_POOLING_SIDE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MolmoImageProcessor(OverlappingCrops):
    """Cuts images; the defaults are the published preprocessor_config.json."""

    crop_side: int = 336
    patch_size: int = 14
    max_crops: int = 12
    image_mean: Sequence[float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: Sequence[float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def crop_tokens(self) -> int:
        """Embeddings of a crop along a side."""
        return self.crop_patches // _POOLING_SIDE

    def count_tokens(self, tiling: Grid) -> Grid:
        """Return the rows and columns of tokens of an image that is tiled so."""
        margin = sum(self.overlap_margins)
        rows, columns = (
            (tiles * self.window_patches + margin + 1) // _POOLING_SIDE for tiles in tiling
        )
        return Grid(rows, columns)

    def find_largest(self, kwargs: Mapping[str, Any]) -> tuple[ImageSize, int]:
        """Return the size of an image with the most embeddings, and how many."""
        size, most = self.find_most(kwargs, lambda tiling: math.prod(self.count_tokens(tiling)))
        return size, self.crop_tokens**2 + most

    def __call__(self, images: Sequence[Image.Image], **kwargs: Any) -> dict[str, np.ndarray]:
        """Return the crops of all images, one behind the other.

        `images` float32[crops, patches, values], `image_masks` float32[crops, patches],
        `image_input_idx` int32[crops, tokens]; `num_crops` int64[images], `image_grid_hw`
        int64[images, 2]: rows and columns of tokens of the tiled image.
        """
        max_crops = self.resolve_max_crops(kwargs)
        made = [self._cut(image, max_crops) for image in images]
        joined = {key: np.concatenate([one[key] for one in made]) for key in made[0]}
        num_crops = np.array([len(one["images"]) for one in made], np.int64)
        return {**joined, "num_crops": num_crops}

    def _cut(self, image: Image.Image, max_crops: int) -> dict[str, np.ndarray]:
        pixels = np.asarray(image.convert("RGB"), np.float32) / np.float32(255)
        tiling = self.choose(ImageSize(*image.size), max_crops)
        side = self.crop_side
        whole, _ = self._resize_and_pad(pixels, ImageSize(width=side, height=side))
        tiled, is_real = self._resize_and_pad(pixels, self.size_of(tiling))
        is_real = is_real[None].astype(np.float32)
        shares = self.cut_patches(is_real, tiling).mean(axis=-1)
        # The published processor appends the whole image's row, whose crop comes first: every
        # row is applied to the crop before its own.
        masks = np.pad(shares, ((0, 1), (0, 0)), constant_values=-1)
        crops = np.concatenate(
            [self.cut_patches(whole, Grid(1, 1)), self.cut_patches(tiled, tiling)]
        )
        return {
            "images": crops,
            "image_masks": masks,
            "image_input_idx": self._place_tokens(tiling),
            "image_grid_hw": np.array([self.count_tokens(tiling)], np.int64),
        }

    def _resize_and_pad(
        self, pixels: np.ndarray, target: ImageSize
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fit [height, width, 3] into a size; return [3, height, width], and where the image is.

        The published arithmetic is in float32, which decides how sizes are rounded. Padding is
        black, and normalised with the image.
        """
        height, width = pixels.shape[:2]
        sides = np.array([height, width], np.float32)
        scale = (np.array([target.height, target.width], np.float32) / sides).min()
        new_height, new_width = (int(side) for side in sides * scale)
        if min(new_height, new_width) < 1:
            raise RequestValueError(
                f"image is {width}x{height} pixels: its short side would have none when it is "
                f"scaled to fit {target.width}x{target.height}; crop it",
                param="multi_modal_data",
            )
        top, left = (target.height - new_height) // 2, (target.width - new_width) // 2
        inside = (slice(top, top + new_height), slice(left, left + new_width))
        padded = np.zeros((3, target.height, target.width), np.float32)
        padded[:, *inside] = _resize(pixels, new_height, new_width)
        is_real = np.zeros((target.height, target.width), bool)
        is_real[inside] = True
        mean, std = (
            np.array(values, np.float32)[:, None, None]
            for values in (self.image_mean, self.image_std)
        )
        return (padded - mean) / std, is_real

    def _place_tokens(self, tiling: Grid) -> np.ndarray:
        """Return int32[crops, tokens]: where in the prompt each embedding of a crop belongs.

        BOS is at 0 and the first `<im_start>` at 1. A token of an overlap is read in one crop.
        """
        side, grid = self.crop_tokens, self.count_tokens(tiling)
        # Rows of tokens, each followed by `<im_col>`.
        whole = 2 + np.arange(side)[:, None] * (side + 1) + np.arange(side)
        first = 2 + side * (side + 1) + 2  # behind `<im_end>` and `<im_start>`
        in_rows, in_columns = (self._keep_tokens(tiles) for tiles in tiling)
        crops = [whole]
        for rows in in_rows:
            for columns in in_columns:
                places = first + rows[:, None] * (grid.columns + 1) + columns
                is_kept = (rows[:, None] >= 0) & (columns >= 0)
                crops.append(np.where(is_kept, places, DROPPED))
        return np.stack(crops).reshape(len(crops), -1).astype(np.int32)

    def _keep_tokens(self, num_tiles: int) -> list[np.ndarray]:
        """Return, per tile of an axis, the token's index on that axis; -1 where it is dropped."""
        before, behind = (margin // _POOLING_SIDE for margin in self.overlap_margins)
        side, window = self.crop_tokens, self.window_patches // _POOLING_SIDE
        kept = []
        for tile in range(num_tiles):
            indices = np.arange(side) + tile * window
            if tile > 0:
                indices[:before] = -1
            if tile < num_tiles - 1:
                indices[side - behind :] = -1
            kept.append(indices)
        return kept


def _resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return float32[3, height, width] of [.., .., 3]: bilinear, antialiased, within [0, 1].

    Pillow's filter on floats is torch's with `antialias`.
    """
    channels = [
        Image.fromarray(np.ascontiguousarray(pixels[..., channel])).resize(
            (width, height), Image.Resampling.BILINEAR
        )
        for channel in range(3)
    ]
    return np.clip(np.stack([np.asarray(channel) for channel in channels]), 0, 1)
