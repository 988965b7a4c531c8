"""Videos -> sampled frames -> patches, with the second at which each step of patches is shown.

As HF's `Qwen3VLVideoProcessor`, which needs torchvision, and `Qwen3VLProcessor` behind it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from mmjax.errors import RequestValueError
from mmjax.processing.image_processors.patches import (
    DEFAULT_FPS,
    VideoPatcher,
    check_aspect_ratio,
)
from mmjax.processing.items.items import ImageSize

PLANNED_FRAMES = 4
"""Frames of the video that memory is planned for: of all frames together `size` limits the pixels,
so that more frames are smaller ones."""

_SAMPLING: Mapping[str, Any] = {
    "do_sample_frames": True,
    "fps": 2,
    "num_frames": None,
    "min_frames": 4,
    "max_frames": 768,
}
"""Of a checkpoint that says nothing."""
_REQUESTED = ("do_sample_frames", "fps", "num_frames")
"""Those of them that a request may say."""


class SampledVideoPatcher(VideoPatcher):
    """`size` is of all frames together: a frame's pixels, times the number of frames."""

    max_video_tokens = 768  # of one frame

    def __init__(self, hf_processor: Any, *, settings: Mapping[str, Any], **options: Any) -> None:
        super().__init__(hf_processor, settings=settings, **options)
        self.sampling = {key: settings.get(key, value) for key, value in _SAMPLING.items()}

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return super().valid_kwargs | set(_REQUESTED)

    def __call__(self, videos: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return `timestamps` float64[steps of all videos], seconds, beside patches and grids.

        A video is its frames, or a pair of them and its metadata.
        """
        asked = {key: kwargs.pop(key) for key in _REQUESTED if kwargs.get(key) is not None}
        rest = {key: value for key, value in kwargs.items() if key not in _REQUESTED}
        pairs = [video if isinstance(video, tuple) else (video, {}) for video in videos]
        sampled = [self._sample(frames, metadata, asked) for frames, metadata in pairs]
        outputs = super().__call__([frames for frames, _ in sampled], **rest)
        return outputs | {"timestamps": np.concatenate([seconds for _, seconds in sampled])}

    def _sample(
        self, frames: np.ndarray, metadata: Mapping[str, Any], asked: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the frames that are seen, and the seconds of their steps.

        Frames that were sampled already, of more by the metadata, are all seen.
        """
        total = metadata.get("total_num_frames") or len(frames)
        fps = float(metadata.get("fps") or DEFAULT_FPS)
        is_wanted = asked.get("do_sample_frames", self.sampling["do_sample_frames"])
        if is_wanted and total == len(frames):
            places = self._choose(total, fps, asked)
            return frames[places], self.find_seconds(places, fps)
        given = metadata.get("frames_indices")
        places = np.arange(len(frames)) if given is None else np.asarray(given)
        if places.shape != (len(frames),) or places.dtype.kind not in "iu":
            raise RequestValueError(
                f"a video's metadata have the `frames_indices` {given!r}, and it has "
                f"{len(frames)} frames; give the whole number of each",
                param="multi_modal_data",
            )
        return frames, self.find_seconds(places, fps)

    def _choose(self, total: int, fps: float, asked: Mapping[str, Any]) -> np.ndarray:
        """Return the places of the frames to see, of `total`."""
        for key in ("fps", "num_frames"):
            value = asked.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise _refuse(f"`{key}` is {value!r}", "it must be a positive number")
        if "fps" in asked and "num_frames" in asked:
            raise _refuse("`fps` and `num_frames` are both given", "give one of them")
        wanted = asked.get("num_frames")
        if wanted is None and "fps" not in asked:
            wanted = self.sampling["num_frames"]
        if wanted is None:
            per_second = asked.get("fps", self.sampling["fps"])
            least, most = self.sampling["min_frames"], self.sampling["max_frames"]
            wanted = min(max(int(total / fps * per_second), least), most)
        return np.linspace(0, total - 1, min(int(wanted), total)).round().astype(int)

    def find_seconds(self, places: np.ndarray, fps: float) -> np.ndarray:
        """Return float64[steps]: halfway between a step's first frame and its last."""
        depth = self.hf.temporal_patch_size
        padded = np.concatenate([places, np.repeat(places[-1:], -len(places) % depth)])
        seconds = (padded / fps).reshape(-1, depth)
        return (seconds[:, 0] + seconds[:, -1]) / 2

    def get_frame_pixels(self, kwargs: Mapping[str, Any]) -> int:
        """Return the largest number of pixels of a frame of `PLANNED_FRAMES`."""
        smallest, largest = self.get_pixel_limits(kwargs)
        if self.is_capped(kwargs):
            size = {"shortest_edge": smallest, "longest_edge": largest}
            largest = self._cap(size, PLANNED_FRAMES)["longest_edge"]
        return largest // PLANNED_FRAMES

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
        # HF refuses a video of one frame; it is seen as a picture is, in every layer of a patch.
        num_frames = max(num_frames, depth)
        num_pixels = num_frames * height * width
        rounded = [round(side / unit) * unit for side in (width, height)]
        volume = round(num_frames / depth) * depth * math.prod(rounded)
        if volume > limits["longest_edge"]:
            shrink = math.sqrt(num_pixels / limits["longest_edge"])
            rounded = [
                max(unit, math.floor(side / shrink / unit) * unit) for side in (width, height)
            ]
        elif volume < limits["shortest_edge"]:
            grow = math.sqrt(limits["shortest_edge"] / num_pixels)
            rounded = [math.ceil(side * grow / unit) * unit for side in (width, height)]
        return ImageSize(*rounded)


def _refuse(found: str, expected: str) -> RequestValueError:
    return RequestValueError(
        f"{found} in mm_processor_kwargs; {expected}", param="mm_processor_kwargs"
    )
