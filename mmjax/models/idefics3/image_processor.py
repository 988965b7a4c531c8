"""Pictures and frames -> tiles, as HF's Idefics3 image processor for Pillow makes them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from mmjax.errors import RequestValueError
from mmjax.processing.image_processors.frames import Timing, read_timing, split_pairs

_MOST_SIDE = 4096
"""HF scales no side beyond it, whatever `size` says (`MAX_IMAGE_SIZE`)."""
_SMALL = (
    *("zero one two three four five six seven eight nine ten eleven twelve thirteen".split()),
    *("fourteen fifteen sixteen seventeen eighteen nineteen".split()),
)
_TENS = ("", "", *"twenty thirty forty fifty sixty seventy eighty ninety".split())


class TileCutter:
    """An image becomes the tiles of its grid and the whole of it, all of one size."""

    valid_kwargs: ClassVar = frozenset(
        {
            *("do_image_splitting", "size", "resample", "do_rescale", "rescale_factor"),
            *("do_normalize", "image_mean", "image_std"),
        }
    )

    def __init__(self, hf: Any) -> None:
        """`hf`: an `Idefics3ImageProcessorPil` whose pixels stay bytes."""
        self.hf = hf

    def __call__(
        self, images: Sequence[Any], *, return_tensors: str = "np", **kwargs: Any
    ) -> dict[str, Any]:
        """Return `pixel_values` uint8[units, C, Y, X], `image_grid` int64[images, 2].

        Rows and columns are 0 of an image that is not split.
        """
        cut = [self.cut(image, kwargs) for image in images]
        return {
            "pixel_values": np.concatenate([pixels for pixels, _, _ in cut]),
            "image_grid": np.array([grid for _, grid, _ in cut], np.int64),
            "image_affine": cut[0][2],
        }

    def cut(self, image: Any, kwargs: Mapping[str, Any]) -> tuple[np.ndarray, list[int], Any]:
        """Return the units of one image, its grid, and what makes pixels of bytes."""
        self.find_longest(kwargs)
        fixed = {"do_resize": True, "do_pad": False, "return_row_col_info": True}
        outputs = self.hf([image], **{**kwargs, **fixed})
        grid = [outputs["rows"][0][0], outputs["cols"][0][0]]
        return np.stack(outputs["pixel_values"][0]), grid, outputs["image_affine"]

    def find_longest(self, kwargs: Mapping[str, Any]) -> int:
        """Return the longest side to which these kwargs scale; `RequestValueError` for no side."""
        size: Any = kwargs.get("size") or dict(self.hf.size)
        longest: Any = size.get("longest_edge") if isinstance(size, Mapping) else None
        others = [] if not isinstance(size, Mapping) else [k for k, v in size.items() if v]
        is_side = isinstance(longest, int) and not isinstance(longest, bool)
        if not is_side or not 1 <= longest <= _MOST_SIDE or len(others) > 1:
            raise RequestValueError(
                f"`size` is {str(size)[:100]}; this model's pictures are scaled by "
                f'{{"longest_edge": N}}, N from 1 to {_MOST_SIDE}',
                param="mm_processor_kwargs",
            )
        return longest

    def find_largest_grid(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the rows and columns of the largest picture's tiles; (0, 0): it is not split."""
        is_split = kwargs.get("do_image_splitting", self.hf.do_image_splitting)
        side = self.hf.max_image_size["longest_edge"]
        number = math.ceil(self.find_longest(kwargs) / side)
        return (number, number) if is_split and number > 1 else (0, 0)


class FrameCutter:
    """Frames are scaled as images that are not split."""

    valid_kwargs: ClassVar = TileCutter.valid_kwargs - {"do_image_splitting"}

    def __init__(self, hf_class: Any, settings: Mapping[str, Any]) -> None:
        """`settings`: of the checkpoint's videos."""
        known = hf_class.valid_kwargs.__annotations__
        own = {key: value for key, value in settings.items() if key in known}
        sampling = settings.get("video_sampling") or {}
        if "size" not in own and sampling.get("video_size"):
            own["size"] = sampling["video_size"]
        self.hf = hf_class(**own)
        self._tiles = TileCutter(self.hf)

    def __call__(
        self, videos: Sequence[Any], *, return_tensors: str = "np", **kwargs: Any
    ) -> dict[str, Any]:
        """Return the frames of all videos, and the seconds that they are written with.

        Args:
            videos: uint8[frames, height, width, 3], or a pair of that and its metadata.
            return_tensors: "np".
            kwargs: Of `valid_kwargs`.

        Returns:
            `pixel_values_videos` uint8[frames, C, Y, X], `num_frames` int64[videos], and
            `video_seconds` int64[videos + frames]: of each video its length, then its frames'.
        """
        pairs = split_pairs(videos)
        kwargs["do_image_splitting"] = False
        cut = [
            self._tiles.cut(Image.fromarray(frame), kwargs)
            for frames, _ in pairs
            for frame in frames
        ]
        seconds = [find_seconds(read_timing(len(frames), known)) for frames, known in pairs]
        return {
            "pixel_values_videos": np.concatenate([pixels for pixels, _, _ in cut]),
            "num_frames": np.array([len(frames) for frames, _ in pairs], np.int64),
            "video_seconds": np.concatenate(seconds),
            "video_affine": cut[0][2],
        }


def find_seconds(timing: Timing) -> np.ndarray:
    """Return int64[1 + frames]: a video's whole seconds, and those at which its frames stand."""
    seconds = timing.seconds
    whole = seconds[-1] if timing.duration is None else timing.duration
    return np.array([whole, *seconds]).astype(np.int64)


def write_number(number: int) -> str:
    """Return a number from 0 to 999,999 in words: "one hundred and twenty-eight"."""
    if number < 100:
        tens, ones = divmod(number, 10)
        rest = f"-{_SMALL[ones]}" if ones else ""
        return _SMALL[number] if number < 20 else _TENS[tens] + rest
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    joint = ", " if rest >= 100 else " and "
    return f"{write_number(count)} {name}" + (joint + write_number(rest) if rest else "")
