"""Molmo 2's crops: the whole image squeezed into one, and windows over an image of many; frames.

As `Molmo2ImageProcessor` and `Molmo2VideoProcessor` of transformers, which need torchvision, in
numpy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from mmjax.models.molmo2.host_inputs import (
    COLUMN,
    END,
    FRAME_END,
    FRAME_START,
    LOW_START,
    NO_PATCH,
    START,
)
from mmjax.processing.image_processors.affine import make_affine
from mmjax.processing.image_processors.crops import Grid, OverlappingCrops
from mmjax.processing.image_processors.frames import FrameSampling, Timing, split_pairs
from mmjax.processing.items.items import ImageSize

_WHOLE = Grid(1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Molmo2ImageProcessor(OverlappingCrops):
    """Cuts images; the defaults are HF's."""

    crop_side: int = 378
    patch_size: int = 14
    pooling_size: Sequence[int] = (2, 2)
    """Rows and columns of patches that become one embedding."""
    max_crops: int = 8
    image_mean: Sequence[float] = (0.5, 0.5, 0.5)
    image_std: Sequence[float] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    image_use_col_tokens: bool = True
    """Whether `<im_col>` ends a row of the tiled image."""
    use_single_crop_col_tokens: bool | None = None
    """Whether it ends one of the whole image; None: as above."""
    use_single_crop_start_token: bool = True
    """Whether the whole image has a mark of its own before it."""

    @property
    def affine(self) -> np.ndarray:
        """What makes pixels of bytes."""
        return make_affine(
            rescale_factor=self.rescale_factor, mean=self.image_mean, std=self.image_std
        )

    def squeeze(self, pixels: np.ndarray, tiling: Grid = _WHOLE) -> np.ndarray:
        """Return the crops of uint8[height, width, 3], brought to the size of their tiling."""
        size = self.size_of(tiling)
        return self.cut_patches(
            resize_bilinear(pixels, size.height, size.width).transpose(2, 0, 1), tiling
        )

    def pool(self, tiling: Grid = _WHOLE, first: int = 0) -> tuple[np.ndarray, Grid]:
        """Return a tiling's windows of patches, which count from `first`, and as `pool_grid`."""
        return pool_grid(self.number_cells(tiling) + first, *self.pooling_size)

    def write_rows(self, low: Grid, high: Grid) -> np.ndarray:
        """Return int32[tokens]: the outputs of both views in order, and marks (`embed_rows`)."""
        low_columns = self.use_single_crop_col_tokens
        has_columns = self.image_use_col_tokens if low_columns is None else low_columns
        start = LOW_START if self.use_single_crop_start_token else START
        first = write_view(low, 0, (start, END), has_columns=has_columns)
        second = write_view(
            high, low.rows * low.columns, (START, END), has_columns=self.image_use_col_tokens
        )
        return np.concatenate([first, second]).astype(np.int32)

    def find_largest(self, kwargs: Mapping[str, Any]) -> tuple[ImageSize, int]:
        """Return the size of an image with the most embeddings, marks included, and how many."""
        _, low = self.pool()

        def count(tiling: Grid) -> int:
            return len(self.write_rows(low, self.count_windows(tiling, *self.pooling_size)))

        return self.find_most(kwargs, count)

    def __call__(self, images: Sequence[Image.Image], **kwargs: Any) -> dict[str, Any]:
        """Return the crops of each image, in lists but for `image_affine`.

        `pixel_values` uint8[crops, patches, values]; `image_token_pooling` int32[windows, patches]:
        the patches of a window, counted from the image's first; `image_rows` int32[tokens], as
        `write_rows` says; `image_grids` int64[4]: rows and columns of both views.
        """
        max_crops = self.resolve_max_crops(kwargs)
        made = [self._cut(image, max_crops) for image in images]
        return {**{key: [one[key] for one in made] for key in made[0]}, "image_affine": self.affine}

    def _cut(self, image: Image.Image, max_crops: int) -> dict[str, np.ndarray]:
        pixels = np.asarray(image.convert("RGB"))
        tiling = self.choose(ImageSize(*image.size), max_crops)
        low_windows, low_grid = self.pool()
        high_windows, high_grid = self.pool(tiling, self.crop_patches**2)
        return {
            "pixel_values": np.concatenate([self.squeeze(pixels), self.squeeze(pixels, tiling)]),
            "image_token_pooling": np.concatenate([low_windows, high_windows]).astype(np.int32),
            "image_rows": self.write_rows(low_grid, high_grid),
            "image_grids": np.array([*low_grid, *high_grid], np.int64),
        }


@dataclass(frozen=True, kw_only=True)
class Molmo2Sampling(FrameSampling):
    """So many frames at even steps, of a short video `max_fps` a second."""

    num_frames: int | None = 64
    max_fps: int | float = 2

    def select(self, frames: np.ndarray, metadata: Mapping[str, Any]) -> tuple[np.ndarray, Timing]:
        """Take frames of which nobody says the speed for as many a second as are seen at most."""
        return super().select(frames, {**metadata, "fps": metadata.get("fps") or self.max_fps})

    def choose(self, timing: Timing) -> np.ndarray:
        duration = timing.total / timing.fps if timing.duration is None else timing.duration
        if self.num_frames is None:
            assert self.fps is not None, "one of them is always set"
            wanted = int(duration * self.fps)
        else:
            fastest = int(duration * self.max_fps) if timing.fps > self.max_fps else math.inf
            wanted = min(self.num_frames, fastest)
        step = timing.total / max(min(wanted, timing.total), 1)
        places = np.arange(0, timing.total, step).astype(np.float32).astype(np.int64)
        return places[places < timing.total]  # rounding may give one more


@dataclass(frozen=True, slots=True, kw_only=True)
class Molmo2VideoProcessor(Molmo2ImageProcessor):
    """Squeezes each frame into a crop, as the whole of an image; the defaults are HF's."""

    pooling_size: Sequence[int] = (3, 3)
    video_use_col_tokens: bool = False
    """Whether `<im_col>` ends a row of a frame."""
    use_frame_special_tokens: bool = True
    """Whether a frame has marks of its own around it, not an image's."""
    sampling: Molmo2Sampling

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return self.sampling.requested

    @property
    def num_frame_tokens(self) -> int:
        """How many embeddings a frame has, marks included."""
        return len(self.pool_frame()[1])

    def pool_frame(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the windows of a frame, and int[tokens]: its rows, marks included."""
        windows, grid = self.pool()
        marks = (FRAME_START, FRAME_END) if self.use_frame_special_tokens else (START, END)
        return windows, write_view(grid, 0, marks, has_columns=self.video_use_col_tokens)

    def __call__(self, videos: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return the frames of each video that are seen, in lists but for `video_affine`.

        `pixel_values_videos` uint8[frames, patches, values]; as of images `video_token_pooling` and
        `video_rows`; float64[frames] `timestamps`.
        """
        sampling = self.sampling.asked(kwargs)
        seen = [sampling.select(*pair) for pair in split_pairs(videos)]
        windows, rows = self.pool_frame()
        lengths = [len(frames) for frames, _ in seen]
        return {
            "pixel_values_videos": [
                np.concatenate([self.squeeze(frame) for frame in frames]) for frames, _ in seen
            ],
            "video_token_pooling": [_repeat(windows, n, self.crop_patches**2) for n in lengths],
            "video_rows": [_repeat(rows, n, len(windows)) for n in lengths],
            "timestamps": [timing.seconds for _, timing in seen],
            "video_affine": self.affine,
        }


def _repeat(numbers: np.ndarray, count: int, step: int) -> np.ndarray:
    """Return int32: the numbers of so many frames, which count from the video's first."""
    shift = (np.arange(count) * step).reshape(-1, *[1] * numbers.ndim)
    repeated = np.where(numbers < 0, numbers, numbers + shift)
    return repeated.reshape(-1, *numbers.shape[1:]).astype(np.int32)


def write_view(grid: Grid, first: int, marks: tuple[int, int], *, has_columns: bool) -> np.ndarray:
    """Return the rows of a grid of outputs from `first` on, between marks."""
    start, end = marks
    rows = np.arange(grid.rows * grid.columns).reshape(grid) + first
    if has_columns:
        rows = np.pad(rows, ((0, 0), (0, 1)), constant_values=COLUMN)
    return np.concatenate([[start], rows.reshape(-1), [end]])


def pool_grid(grid: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, Grid]:
    """Return a grid's windows, int[windows, rows * columns], and how many along each axis.

    Windows at the edges lack patches (`NO_PATCH`), more of them behind than before.
    """
    lacking = [-side % pooled for side, pooled in zip(grid.shape, (rows, columns), strict=True)]
    padded = np.pad(grid, [(n // 2, n - n // 2) for n in lacking], constant_values=NO_PATCH)
    found = Grid(padded.shape[0] // rows, padded.shape[1] // columns)
    windows = padded.reshape(found.rows, rows, found.columns, columns).transpose(0, 2, 1, 3)
    return windows.reshape(-1, rows * columns), found


def resize_bilinear(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return uint8[height, width, C] of [.., .., C], of two by two pixels each: no antialiasing.

    As torch's `interpolate` of floats, rounded to bytes afterwards. One of two products is added
    without being rounded to float32 before: so torch's processors do it, in most of their loops. A
    byte in some 100,000 is another where the sum is a half, as with torch by its threads.
    """
    across = _mix(pixels.astype(np.float32), width, axis=1)
    return np.clip(np.rint(_mix(across, height, axis=0)), 0, 255).astype(np.uint8)


def _mix(pixels: np.ndarray, side: int, *, axis: int) -> np.ndarray:
    old = pixels.shape[axis]
    scale = np.float64(np.float32(old) / np.float32(side))
    places = ((np.arange(side) + 0.5) * scale - 0.5).astype(np.float32).clip(0)
    first = np.minimum(places.astype(np.int64), old - 1)
    share = (places - first.astype(np.float32)).reshape(-1, *[1] * (2 - axis))
    left, right = (pixels.take(at, axis) for at in (first, np.minimum(first + 1, old - 1)))
    rest = (1 - share).astype(np.float64)
    return (left * rest + (right * share).astype(np.float64)).astype(np.float32)
