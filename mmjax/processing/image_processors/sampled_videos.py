"""Videos -> sampled frames -> patches, with the second at which each step of patches is shown.

As HF's `Qwen3VLVideoProcessor`, which needs torchvision, and `Qwen3VLProcessor` behind it.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from mmjax.processing.image_processors.frames import FrameSampling, Timing, split_pairs
from mmjax.processing.image_processors.patches import (
    PLANNED_FRAMES,
    VideoPatcher,
    check_aspect_ratio,
    find_grid,
)
from mmjax.processing.items.items import ImageSize


class SampledVideoPatcher(VideoPatcher):
    """`size` is of all frames together: a frame's pixels, times the number of frames."""

    max_video_tokens = 768  # of one frame
    timing: ClassVar = frozenset[str]()
    sampling: FrameSampling = FrameSampling(fps=2, min_frames=4, max_frames=768)
    """Of a checkpoint that says nothing."""

    def __init__(self, hf_processor: Any, *, settings: Mapping[str, Any], **options: Any) -> None:
        super().__init__(hf_processor, settings=settings, **options)
        self.sampling = self.sampling.of_checkpoint(settings)

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return super().valid_kwargs | self.sampling.requested

    def __call__(self, videos: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return `timestamps` float64[steps of all videos], seconds, beside patches and grids.

        A video is its frames, or a pair of them and its metadata.
        """
        sampling = self.sampling.asked(kwargs)
        rest = {key: value for key, value in kwargs.items() if key not in sampling.requested}
        seen = [sampling.select(*pair) for pair in split_pairs(videos)]
        outputs = super().__call__([frames for frames, _ in seen], **rest)
        seconds = [self.find_seconds(timing) for _, timing in seen]
        return outputs | {"timestamps": np.concatenate(seconds)}

    def find_seconds(self, timing: Timing) -> np.ndarray:
        """Return float64[steps]: the second that is written for each step of patches."""
        depth, seconds = self.hf.temporal_patch_size, timing.seconds
        padding = np.repeat(seconds[-1:], -len(seconds) % depth)
        return self.time_steps(np.concatenate([seconds, padding]).reshape(-1, depth))

    def time_steps(self, seconds: np.ndarray) -> np.ndarray:
        """Return float64[steps] of [steps, depth]: halfway between the first frame and the last."""
        return (seconds[:, 0] + seconds[:, -1]) / 2

    def find_largest_video(
        self, kwargs: Mapping[str, Any], num_tokens: int | None
    ) -> tuple[int, ImageSize]:
        """Return the number of frames, and their size in units, of the most embeddings.

        More frames are smaller ones: it depends on how HF rounds their number, so all are tried.
        """
        most = num_tokens or sys.maxsize
        found = [
            (number, self._fit(kwargs, number, most // self.count_steps(number)))
            for number in range(1, (self.sampling.max_frames or PLANNED_FRAMES) + 1)
            if self.count_steps(number) <= most
        ]
        return max(found, key=lambda one: self.count_steps(one[0]) * math.prod(one[1]))

    def _fit(self, kwargs: Mapping[str, Any], num_frames: int, most_units: int) -> ImageSize:
        """Return the size in units, as HF resizes it, of the largest frame of so many."""
        limits = self._limit(kwargs, num_frames)
        volume = limits["longest_edge"] // (self._round(num_frames) * self.unit**2)
        grid = find_grid(min(volume, most_units))
        given = ImageSize(*(side * self.unit for side in grid))
        return ImageSize(*(side // self.unit for side in self.find_size(given, num_frames, limits)))

    def _limit(self, kwargs: Mapping[str, Any], num_frames: int) -> dict[str, int]:
        """Return the smallest and the largest number of pixels of so many frames."""
        smallest, largest = self.get_pixel_limits(kwargs)
        limits = {"shortest_edge": smallest, "longest_edge": largest}
        return self._cap(limits, num_frames) if self.is_capped(kwargs) else limits

    def _round(self, num_frames: int) -> int:
        """Return the number of frames that HF multiplies a frame's pixels by.

        HF refuses a video of one frame; it is seen as a picture is, in every layer of a patch.
        """
        depth = self.hf.temporal_patch_size
        return round(max(num_frames, depth) / depth) * depth

    def _cap(self, size: Mapping[str, int], num_frames: int) -> dict[str, int]:
        """Give each frame an even share, of `max_video_tokens` at most."""
        share = min(self.max_video_tokens * self.unit**2, size["longest_edge"] // num_frames)
        share = max(share, int(size["shortest_edge"] * 1.05))
        return {"shortest_edge": size["shortest_edge"], "longest_edge": share * num_frames}

    def _resize(
        self, images: list[Image.Image], resolved: dict[str, Any]
    ) -> tuple[list[Image.Image], dict[str, Any]]:
        """Resize frames here, by their number: HF's processor knows of one image at a time."""
        if resolved.get("do_resize", self.hf.do_resize) is False:
            return images, resolved
        size = self.find_size(ImageSize(*images[0].size), len(images), resolved["size"])
        resample = resolved.get("resample") or self.hf.resample
        resized = [image.resize(size, resample) for image in images]
        return resized, {**resolved, "do_resize": False}

    def find_size(self, given: ImageSize, num_frames: int, limits: Mapping[str, int]) -> ImageSize:
        """Return what a frame is resized to: HF's `smart_resize`, of videos."""
        unit, depth = self.unit, self.hf.temporal_patch_size
        width, height = given
        if min(given) < unit:
            scale = max(unit / height, unit / width)
            width, height = int(width * scale), int(height * scale)
            check_aspect_ratio(ImageSize(width=width, height=height), "video")
        num_pixels = max(num_frames, depth) * height * width
        rounded = [round(side / unit) * unit for side in (width, height)]
        volume = self._round(num_frames) * math.prod(rounded)
        if volume > limits["longest_edge"]:
            shrink = math.sqrt(num_pixels / limits["longest_edge"])
            rounded = [
                max(unit, math.floor(side / shrink / unit) * unit) for side in (width, height)
            ]
        elif volume < limits["shortest_edge"]:
            grow = math.sqrt(limits["shortest_edge"] / num_pixels)
            rounded = [math.ceil(side * grow / unit) * unit for side in (width, height)]
        return ImageSize(*rounded)
