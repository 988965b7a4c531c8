"""How MiniCPM-V cuts pictures and frames: patches of the whole and of slices, by HF's processor.

Of a picture that is larger than `scale_resolution` squared, up to `max_slice_nums` slices follow
the whole, in the arrangement whose shape is closest; each is scaled to about as many pixels. Frames
are chosen as HF's `MiniCPMV4_6VideoProcessor` does, which needs torchvision.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from mmjax.errors import CheckpointError, check_settings
from mmjax.processing.image_processors.frames import FrameSampling, Timing, split_pairs
from mmjax.processing.image_processors.image import check_bool
from mmjax.processing.image_processors.patches import PLANNED_ASPECT_RATIO, check_aspect_ratio
from mmjax.processing.image_processors.tiling import check_limits
from mmjax.processing.items.items import ImageSize
from mmjax.processing.media.decode import map_in_threads

_TENTH = 0.1
"""Seconds between the frames of which those of a long video are chosen."""


class SliceCutter:
    """The part for images."""

    valid_kwargs = frozenset({"max_slice_nums", "slice_mode"})
    planned_ratio = PLANNED_ASPECT_RATIO
    """Of the sides of the pictures that memory is planned for."""
    planned_slices = 81
    """As many pixels as these the largest picture has: any scale gives as many embeddings."""
    least_scale = 1
    """Of its sides, over those of its slices."""

    def __init__(self, hf_processor: Any, *, patch_size: int, downsample_mode: str) -> None:
        """`patch_size`, `downsample_mode`: of config.json, which the tower goes by."""
        self.hf = hf_processor
        wanted = {"patch_size": patch_size, "downsample_mode": downsample_mode, "do_resize": True}
        where, source = "the image processor", "the tower of config.json takes"
        check_settings(hf_processor, wanted, where=where, source=source)
        self.unit = patch_size * (2 if downsample_mode == "4x" else 4)
        """The side of the square of pixels that one embedding stands for."""
        # What is largest depends on the number of slices alone.
        self.find_largest = cache(self._find_largest)

    def __call__(self, images: Sequence[Image.Image], **kwargs: Any) -> dict[str, Any]:
        """Return the patches of all units (wholes and slices), one behind the other.

        Returns:
            `pixel_values` uint8[patches, C, rows, columns], row by row; `target_sizes`
            int32[units, 2], rows and columns of patches; `image_grids` int64[images, 2], rows and
            columns of slices (0, 0: none); `image_num_units`, `image_num_patches` int64[images].
        """
        for image in images:
            check_aspect_ratio(ImageSize(*image.size), "image")
        most = self.resolve(kwargs)
        # One by one: of a batch, all would be resized as the first.
        made = map_in_threads(lambda one: self.cut(one, most, kwargs), images)
        sizes = [one["target_sizes"] for one in made]
        return {
            "pixel_values": np.concatenate([_split(one["pixel_values"]) for one in made]),
            "target_sizes": np.concatenate(sizes),
            "image_grids": np.array([one["grids"][0] for one in made], np.int64),
            "image_num_units": np.array([len(one) for one in sizes], np.int64),
            "image_num_patches": np.array([one.prod(-1).sum() for one in sizes], np.int64),
            "image_affine": made[0]["image_affine"],
        }

    def cut(self, image: Image.Image, most: int, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return HF's tensors of a picture, of at most so many slices; `kwargs`: of the call."""
        slices = {"max_slice_nums": most, "slice_mode": most > 1}
        return self.hf([image], return_tensors="np", **slices)

    def resolve(self, kwargs: Mapping[str, Any]) -> int:
        """Return the most slices of a call; 1: none is cut. `RequestValueError` for no number."""
        given = {key: value for key, value in kwargs.items() if value is not None}
        most, is_cut = (given.get(n, getattr(self.hf, n)) for n in ("max_slice_nums", "slice_mode"))
        check_limits(1, most, ("slices", "max_slice_nums"))
        return most if check_bool("slice_mode", is_cut) else 1

    def count_tokens(self, size: ImageSize, most: int) -> int:
        """Return how many embeddings a picture has, of at most so many slices."""
        pixels, scale = (size.height, size.width), self.hf.scale_resolution
        grid = self.hf.get_sliced_grid(pixels, most, scale)
        rest = (scale, self.hf.patch_size, self.hf.downsample_mode)
        whole = self.hf.find_best_resize(pixels, *rest, allow_upscale=grid is None)
        slices = (0, 0)
        if grid is not None:
            slices = self.hf.get_refine_size(pixels, grid, *rest, allow_upscale=True)
        return (math.prod(whole) + math.prod(slices)) // self.unit**2

    def _find_largest(self, most: int) -> tuple[ImageSize, int]:
        """Return the size of a picture with the most embeddings, no sliver, and their number."""
        area = most * self.hf.scale_resolution**2
        longest = math.isqrt(area * self.planned_ratio)
        sides = range(-(-area // longest), longest + 1)
        # An operator describes a smaller one, and neither side may be longer.
        scale = max(self.least_scale, math.isqrt(self.planned_slices // most))
        sizes = [ImageSize(width=area // height * scale, height=height * scale) for height in sides]
        counts = [self.count_tokens(size, most) for size in sizes]
        best = max(range(len(sizes)), key=lambda n: (counts[n], min(sizes[n])))
        return sizes[best], counts[best]


@dataclass(frozen=True, kw_only=True)
class SecondSampling(FrameSampling):
    """A frame of each second; of a longer video so many, evenly."""

    max_num_frames: int = 128

    requested = frozenset({"do_sample_frames", "max_num_frames"})

    def choose(self, timing: Timing) -> np.ndarray:
        """Return int64[seen]: a frame may be seen twice, of a video that is slower."""
        most = int(self.max_num_frames) or 1
        duration = timing.total / timing.fps if timing.duration is None else timing.duration
        if duration > most:
            steps = np.linspace(0, int(duration / _TENTH) - 1, most, dtype=int)
            seconds = np.round(steps * _TENTH, 1)
        else:
            seconds = np.arange(max(math.ceil(duration), 1))
        return np.minimum((seconds * timing.fps).astype(np.int64), timing.total - 1)


class FrameSliceCutter(SliceCutter):
    """The part for videos, each frame of which is cut as a picture."""

    planned_ratio, planned_slices = 3, 4  # there are many of them

    def __init__(self, hf_processor: Any, *, settings: Mapping[str, Any], **sizes: Any) -> None:
        """`settings`: the checkpoint's of videos."""
        super().__init__(hf_processor, **sizes)
        if (stacked := settings.get("stack_frames") or 1) != 1:
            raise CheckpointError(
                f"`stack_frames` of the video processor is {stacked}; mmjax shows every frame by "
                "itself: set it to 1"
            )
        self.sampling = SecondSampling().of_checkpoint(settings)
        self.valid_kwargs = SliceCutter.valid_kwargs | self.sampling.requested

    def __call__(self, videos: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return the same of the frames of all videos, by HF's names, and by video.

        A video is its frames, or a pair of them and its metadata.
        """
        sampling = self.sampling.asked(kwargs)
        seen = [sampling.select(*pair)[0] for pair in split_pairs(videos)]
        images = [Image.fromarray(frame) for frames in seen for frame in frames]
        own = {key: value for key, value in kwargs.items() if key in SliceCutter.valid_kwargs}
        cut = super().__call__(images, **own)
        firsts = np.cumsum([0, *map(len, seen[:-1])])
        return {
            "pixel_values_videos": cut["pixel_values"],
            "target_sizes_videos": cut["target_sizes"],
            "video_grids": cut["image_grids"][firsts],
            "video_num_units": np.add.reduceat(cut["image_num_units"], firsts),
            "video_num_patches": np.add.reduceat(cut["image_num_patches"], firsts),
            "video_affine": cut["image_affine"],
        }


def _split(packed: np.ndarray) -> np.ndarray:
    """Return HF's [1, C, rows, patches * columns] as [patches, C, rows, columns]."""
    _, channels, side, _ = packed.shape
    return packed[0].reshape(channels, side, -1, side).transpose(2, 0, 1, 3)


def join_patches(patches: np.ndarray) -> np.ndarray:
    """Undo that: return [1, C, rows, patches * columns] of [patches, C, rows, columns]."""
    _, channels, side, _ = patches.shape
    return patches.transpose(1, 2, 0, 3).reshape(1, channels, side, -1)
