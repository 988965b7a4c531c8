"""Images and videos -> patches in Qwen2-VL's order, through HF's PIL image processor.

A patch is `temporal_patch_size` frames deep. Within a frame, patches stand in blocks of
`merge_size` by `merge_size`, which the tower merges into one embedding.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image

from mmjax.errors import RequestValueError
from mmjax.processing.image_processors.frames import read_speed, read_timing, split_pairs
from mmjax.processing.image_processors.image import bad_kwarg, fit_pixels
from mmjax.processing.items.items import ImageSize
from mmjax.rounding import cdiv

MAX_ASPECT_RATIO = 200
"""HF refuses longer images (`smart_resize`); so do we, before it."""

PLANNED_ASPECT_RATIO = 16
"""Of the images that memory is planned for; a longer one may have a few embeddings more."""

PLANNED_FRAMES = 14
"""Of the videos that memory is planned for, where only `seq_len` bounds their number; longer ones
are admitted within the encoder budget."""

_FIXED = ("patch_size", "merge_size", "temporal_patch_size")


class BytePatches:
    """Qwen2-VL's patches as bytes: what stands before HF's class (`keep_bytes`)."""

    def patchify(
        self, image: np.ndarray, patch_size: int, merge_size: int, temporal_patch_size: int
    ) -> tuple[np.ndarray, int, int]:
        """Cut an image as HF, which makes float32 of it."""
        channels, height, width = image.shape
        rows, columns = height // patch_size, width // patch_size
        squares = image.reshape(
            channels,
            *(rows // merge_size, merge_size, patch_size),
            *(columns // merge_size, merge_size, patch_size),
        )
        patches = squares.transpose(1, 4, 2, 5, 0, 3, 6)  # squares, patches in them, C, pixels
        deep = np.repeat(patches[..., None, :, :], temporal_patch_size, axis=-3)
        return deep.reshape(rows * columns, -1), rows, columns


class RowByRow(BytePatches):
    """The same of PaddleOCR-VL's, which come row by row: uint8[P, C, size, size]."""

    def patchify(
        self, image: np.ndarray, patch_size: int, merge_size: int, temporal_patch_size: int
    ) -> tuple[np.ndarray, int, int]:
        """Cut an image as HF, which makes float32 of it."""
        patches, rows, columns = super().patchify(image, patch_size, 1, temporal_patch_size)
        return patches.reshape(len(patches), -1, patch_size, patch_size), rows, columns


class FlatRowByRow(BytePatches):
    """The same of HunYuan-VL's, which are flat: uint8[P, C * size * size]."""

    def patchify(
        self, image: np.ndarray, patch_size: int, merge_size: int, temporal_patch_size: int
    ) -> tuple[np.ndarray, int, int]:
        """Cut an image as HF, which makes float32 of it."""
        return super().patchify(image, patch_size, 1, temporal_patch_size)


class ImagePatcher:
    """HF's image processor, with every way to say its smallest and largest number of pixels."""

    def __init__(self, hf_processor: Any, *, max_pixels_resized: int) -> None:
        self.hf = hf_processor
        self.max_pixels_resized = max_pixels_resized
        """No request may blow an image up to more."""

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return frozenset(self.hf.valid_kwargs.__annotations__) | {"min_pixels", "max_pixels"}

    @property
    def unit(self) -> int:
        """The side of the square of pixels that one embedding stands for."""
        return self.hf.patch_size * self.hf.merge_size

    def __call__(self, images: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return `pixel_values` uint8[patches, values], `image_grid_thw` int64[images, 3]."""
        for image in images:
            check_aspect_ratio(ImageSize(*image.size), "image")
        return dict(self.hf(list(images), **self.resolve_kwargs(kwargs)))

    def resolve_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Put `min_pixels` and `max_pixels` into a whole `size`; refuse what no model can take."""
        resolved = {key: value for key, value in kwargs.items() if key not in _FIXED}
        for key in _FIXED:
            value, own = kwargs.get(key), getattr(self.hf, key)
            if value is not None and value != own:
                raise RequestValueError(
                    f"`{key}` is {value} in mm_processor_kwargs, but the model has {own}; "
                    "leave it out",
                    param="mm_processor_kwargs",
                )
        smallest, largest = self.get_pixel_limits(kwargs)
        for key in ("min_pixels", "max_pixels"):
            resolved.pop(key, None)
        return {**resolved, "size": {"shortest_edge": smallest, "longest_edge": largest}}

    def get_pixel_limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the smallest and the largest number of pixels that an image is resized to."""
        size = {"shortest_edge": None, "longest_edge": None, **dict(self.hf.size)}
        given = kwargs.get("size") or {}
        if not isinstance(given, Mapping):
            raise bad_kwarg("size", given, "an object of `shortest_edge` and `longest_edge`")
        size |= given
        limits = []
        for key, name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            value = kwargs.get(name)
            value = size[key] if value is None else value
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise bad_kwarg(name, value, "a positive number of pixels")
            limits.append(value)
        smallest, largest = limits
        if smallest > largest:
            raise bad_kwarg("min_pixels", smallest, f"at most max_pixels, which is {largest}")
        if smallest > self.max_pixels_resized:
            raise bad_kwarg("min_pixels", smallest, f"at most {self.max_pixels_resized}")
        return smallest, largest

    def get_frame_pixels(self, kwargs: Mapping[str, Any]) -> int:
        """Return the largest number of pixels of an image, or of a frame."""
        return self.get_pixel_limits(kwargs)[1]

    def find_resized(self, size: ImageSize, kwargs: Mapping[str, Any]) -> ImageSize:
        """Return what an image of this size is resized to: HF's `smart_resize`."""
        does_resize = kwargs.get("do_resize")
        if not (self.hf.do_resize if does_resize is None else does_resize):
            return size
        rounded = ImageSize(*(round(side / self.unit) * self.unit for side in size))
        return fit_pixels(size, rounded, self.unit, *self.get_pixel_limits(kwargs))

    def find_largest_frame(self, kwargs: Mapping[str, Any]) -> ImageSize:
        """Return a size, in units, that gives the most embeddings of a frame.

        (A sliver may round up beyond it, where `max_pixels` is tiny.)
        """
        return find_grid(self.get_frame_pixels(kwargs) // self.unit**2)


@lru_cache(1024)
def find_grid(num_units: int) -> ImageSize:
    """Return the closest two factors of the largest number that has close ones: no sliver.

    Up to `num_units`, which may be a prime; close are those of `PLANNED_ASPECT_RATIO`.
    """
    for number in range(num_units, 0, -1):
        short = next(d for d in range(math.isqrt(number), 0, -1) if number % d == 0)
        if number // short <= PLANNED_ASPECT_RATIO * short:
            return ImageSize(width=number // short, height=short)
    return ImageSize(width=1, height=1)


class CutVideo(NamedTuple):
    """One video's patches."""

    patches: np.ndarray
    """uint8[patches, values]."""
    grid: list[int]
    """Time, rows, columns."""
    affine: np.ndarray
    """What makes pixels of its bytes."""


class VideoPatcher(ImagePatcher):
    """Frames, each cut as an image is, then gathered into patches that span several frames."""

    max_video_tokens = 128_000
    timing: ClassVar[frozenset[str]] = frozenset({"do_sample_frames", "fps"})
    """Names that say what the frames are, which are all seen."""

    def __init__(
        self,
        hf_processor: Any,
        *,
        max_pixels_resized: int,
        settings: Mapping[str, Any],
    ) -> None:
        """`settings`: the checkpoint's of videos, of which HF's image processor knows a part."""
        super().__init__(hf_processor, max_pixels_resized=max_pixels_resized)
        self.cap_pixels_per_frame = bool(settings.get("cap_pixels_per_frame"))
        """Whether long videos have smaller frames, so that `max_video_tokens` hold them all."""
        self.max_video_tokens: int = settings.get("max_video_tokens", self.max_video_tokens)

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return super().valid_kwargs | self.timing | {"cap_pixels_per_frame"}

    def __call__(self, videos: Sequence[np.ndarray], **kwargs: Any) -> dict[str, Any]:
        """Return `pixel_values_videos` uint8[patches, values], `video_grid_thw` int64[videos, 3].

        A video is uint8[frames, height, width, 3].
        """
        read_speed(kwargs)
        rest = {key: value for key, value in kwargs.items() if key not in self.timing}
        cut = [self._cut(video, rest) for video in videos]
        return {
            "pixel_values_videos": np.concatenate([video.patches for video in cut]),
            "video_grid_thw": np.array([video.grid for video in cut], dtype=np.int64),
            "video_affine": cut[0].affine,
        }

    def _cut(self, video: np.ndarray, kwargs: Mapping[str, Any]) -> "CutVideo":
        check_aspect_ratio(ImageSize(width=video.shape[2], height=video.shape[1]), "video")
        resolved = self.resolve_kwargs(kwargs)
        resolved.pop("cap_pixels_per_frame", None)
        if self.is_capped(kwargs):
            resolved["size"] = self._cap(resolved["size"], len(video))
        # Images, not arrays: HF takes an array of height 1 or 3 for channels first.
        images = [Image.fromarray(frame) for frame in video]
        images, resolved = self._resize(images, resolved)
        frames = self.hf(images, **{**resolved, "temporal_patch_size": 1})
        _, rows, columns = frames["image_grid_thw"][0].tolist()
        pixels = frames["pixel_values"].reshape(len(video), rows * columns, self._channels, -1)
        grid = [self.count_steps(len(video)), rows, columns]
        return CutVideo(self._join_frames(pixels), grid, frames["image_affine"])

    def is_capped(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether long videos have smaller frames, as a request says or the checkpoint."""
        given = kwargs.get("cap_pixels_per_frame")
        return self.cap_pixels_per_frame if given is None else bool(given)

    def _resize(
        self, images: list[Image.Image], resolved: dict[str, Any]
    ) -> tuple[list[Image.Image], dict[str, Any]]:
        """Return frames and kwargs for HF, which resizes each frame as an image."""
        return images, resolved

    def find_largest_video(
        self, kwargs: Mapping[str, Any], num_tokens: int | None
    ) -> tuple[int, ImageSize]:
        """Return the number of frames, and their size in units, of the most embeddings.

        Of those that `num_tokens` hold; None: of `PLANNED_FRAMES`.
        """
        frame = self.find_largest_frame(kwargs)
        if num_tokens is None:
            return PLANNED_FRAMES, frame
        num_steps = num_tokens // math.prod(frame)
        return max(min(num_steps * self.hf.temporal_patch_size, PLANNED_FRAMES), 1), frame

    def count_steps(self, num_frames: int) -> int:
        """Return how many patches deep a video is."""
        return cdiv(num_frames, self.hf.temporal_patch_size)

    @property
    def _channels(self) -> int:
        return len(self.hf.image_mean)

    def _join_frames(self, pixels: np.ndarray) -> np.ndarray:
        """[frames, patches, C, values] -> [steps * patches, C * depth * values].

        The last frame is repeated where they do not come out even.
        """
        depth = self.hf.temporal_patch_size
        padding = np.repeat(pixels[-1:], -len(pixels) % depth, axis=0)
        steps = np.concatenate([pixels, padding]).reshape(-1, depth, *pixels.shape[1:])
        joined = steps.transpose(0, 2, 3, 1, 4)  # steps, patches, C, depth, values
        return joined.reshape(joined.shape[0] * joined.shape[1], -1)

    def _cap(self, size: Mapping[str, int], num_frames: int) -> dict[str, int]:
        """Give each frame an even share of 90% of the context (HF: Qwen2VLVideoProcessor)."""
        budget = int(self.max_video_tokens * self.unit**2 * 0.9)
        share = budget * self.hf.temporal_patch_size // num_frames
        smallest = size["shortest_edge"]
        largest = max(min(size["longest_edge"], share), int(smallest * 1.05))
        return {"shortest_edge": smallest, "longest_edge": largest}


class TimedVideoPatcher(VideoPatcher):
    """Videos whose metadata may say how fast they are; a step of patches has its seconds."""

    def __call__(self, videos: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return `second_per_grid_ts` float32[videos] beside the patches and the grids.

        A video is its frames, or a pair of them and its metadata.
        """
        pairs, fps = split_pairs(videos), read_speed(kwargs)
        if fps is not None:
            pairs = [(x, {"fps": fps} if one.get("fps") is None else one) for x, one in pairs]
        timings = [read_timing(len(frames), metadata) for frames, metadata in pairs]
        outputs = super().__call__([frames for frames, _ in pairs], **kwargs)
        depth = self.hf.temporal_patch_size
        seconds = [depth / (timing.share * timing.fps) for timing in timings]
        return outputs | {"second_per_grid_ts": np.array(seconds, np.float32)}


def check_aspect_ratio(size: ImageSize, modality: str) -> None:
    """Refuse an image or a video so long that no grid of patches is as long."""
    if max(size) > MAX_ASPECT_RATIO * min(size):
        raise RequestValueError(
            f"{modality} is {size.width}x{size.height} pixels; the longer side may be at most "
            f"{MAX_ASPECT_RATIO} times the shorter: crop it",
            param="multi_modal_data",
        )
