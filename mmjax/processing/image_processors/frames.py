"""Which frames of a video are seen, and at which second each is shown.

A video is its frames, uint8[frames, height, width, 3], or a pair of them and its metadata: what a
file or a client says of the whole video. `fps`, `total_num_frames`, `duration` in seconds, and
`frames_indices`, the places of the given frames in it; each may be missing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from mmjax.errors import RequestValueError

DEFAULT_FPS = 24.0
"""Of a video whose metadata do not say it (HF's processors: "Defaulting to `fps=24`")."""

MIN_FPS = 1e-3
"""Slower videos are refused: their positions would leave the range of whole numbers in float32."""

_MAX_SECONDS = 1e9
_MAX_ASKED = 1e6
"""Of `fps` and `num_frames` of a request; frames are as many as were given, at most."""


class Timing(NamedTuple):
    """When the frames of a video are shown."""

    fps: float
    """Of the whole video."""
    total: int
    """Frames of the whole video."""
    places: np.ndarray
    """int64[frames]: where the frames at hand stand among them."""
    duration: float | None = None
    """Seconds of the whole video, where somebody says so."""
    share: float = 1.0
    """Of the video's frames, those that were given (HF: of `VideoMetadata.sampled_fps`)."""

    @property
    def seconds(self) -> np.ndarray:
        """float64[frames]: when each is shown."""
        return self.places / self.fps


def split_pairs(videos: Sequence[Any]) -> list[tuple[np.ndarray, Mapping[str, Any]]]:
    """Return the frames and the metadata of each video."""
    return [video if isinstance(video, tuple) else (video, {}) for video in videos]


def read_timing(num_frames: int, metadata: Mapping[str, Any]) -> Timing:
    """Return when `num_frames` frames are shown; `RequestValueError` where that makes no sense."""
    fps, total, duration, indices = (
        metadata.get(name) for name in ("fps", "total_num_frames", "duration", "frames_indices")
    )
    try:
        whole = num_frames if total is None else int(total)
        timing = Timing(
            fps=DEFAULT_FPS if fps is None else float(fps),
            total=whole,
            places=np.asarray(range(num_frames) if indices is None else indices),
            duration=None if duration is None else float(duration),
            share=1.0 if fps is None or indices is None else num_frames / whole,
        )
        is_known = _is_possible(timing, num_frames)
    except (TypeError, ValueError, ArithmeticError):
        timing, is_known = None, False
    if timing is None or not is_known:
        raise RequestValueError(
            f"a video's metadata have `fps` {_cut(fps)}, `total_num_frames` {_cut(total)}, "
            f"`duration` {_cut(duration)} and `frames_indices` {_cut(indices)}, and it has "
            f"{num_frames} frames; expected positive numbers that give at least {MIN_FPS} frames "
            "in a second, and the whole number of each frame",
            param="multi_modal_data",
        )
    return timing


def _is_possible(timing: Timing, num_frames: int) -> bool:
    fps, total, places, duration, share = timing
    if not (math.isfinite(fps) and total >= 1 and fps * share >= MIN_FPS):
        return False
    if places.shape != (num_frames,) or places.dtype.kind not in "iu" or places.min() < 0:
        return False
    return places.max() / fps < _MAX_SECONDS and (duration is None or 0 <= duration < _MAX_SECONDS)


def _cut(value: object) -> str:
    return repr(value)[:64]


@dataclass(frozen=True, kw_only=True)
class FrameSampling:
    """How many frames of a video are seen: so many evenly, or by the second.

    As HF's `Qwen3VLVideoProcessor.sample_frames`. Fields bear the names of HF's settings.
    """

    do_sample_frames: bool = True
    fps: int | float | None = None
    num_frames: int | None = None
    min_frames: int = 1
    max_frames: int | None = None
    """This and `min_frames` bound what `fps` gives."""

    requested: ClassVar[frozenset[str]] = frozenset({"do_sample_frames", "fps", "num_frames"})
    """Those that a request may set."""

    def of_checkpoint(self, settings: Mapping[str, Any]) -> Self:
        """Return this with what a checkpoint's files set."""
        names = {one.name for one in fields(self)}
        given = {k: v for k, v in settings.items() if k in names and v is not None}
        return replace(self, **given)

    def asked(self, kwargs: Mapping[str, Any]) -> Self:
        """Return this with what a request sets; `RequestValueError` for what nobody can see."""
        given = {k: kwargs[k] for k in self.requested if kwargs.get(k) is not None}
        if given.get("do_sample_frames") is False and isinstance(given.get("fps"), list | tuple):
            del given["fps"]  # of frames that were sampled already: in the videos' metadata
        numbers = given.keys() - {"do_sample_frames"}
        for name in sorted(numbers):
            check_positive(name, given[name])
        if len(numbers) > 1:
            raise _refuse("`fps` and `num_frames` are both given", "give one of them")
        if "fps" in given and "num_frames" in self.requested:
            given["num_frames"] = None
        return replace(self, **given)

    def select(self, frames: np.ndarray, metadata: Mapping[str, Any]) -> tuple[np.ndarray, Timing]:
        """Return the frames that are seen, and when.

        Frames that were sampled already are all seen: of more by the metadata, or where these say
        so themselves, as those of vLLM's `VideoAsset` (`do_sample_frames`).
        """
        timing = read_timing(len(frames), metadata)
        is_sampled = timing.total != len(frames) or metadata.get("do_sample_frames") is False
        if is_sampled or not self.do_sample_frames:
            return frames, timing
        places = self.choose(timing)
        return frames[places], timing._replace(places=places)

    def choose(self, timing: Timing) -> np.ndarray:
        """Return int64[seen]: which frames of the whole video are seen."""
        return np.linspace(0, timing.total - 1, self.count(timing)).round().astype(np.int64)

    def count(self, timing: Timing) -> int:
        """Return how many frames of the whole video are seen; HF refuses to ask for more."""
        wanted = self.num_frames
        if wanted is None:
            wanted = timing.total
            if self.fps is not None:
                wanted = max(int(timing.total / timing.fps * self.fps), self.min_frames)
            wanted = wanted if self.max_frames is None else min(wanted, self.max_frames)
        return max(min(int(wanted), timing.total), 1)


class EvenSampling(FrameSampling):
    """The first frame of each of so many equal parts (HF: `default_sample_indices_fn`)."""

    def choose(self, timing: Timing) -> np.ndarray:
        count = self.count(timing)
        return np.arange(count) * timing.total // count


def check_positive(name: str, value: Any, least: float = 0.0) -> float:
    """Return a number of a request; `RequestValueError` for what is none, or out of range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value <= _MAX_ASKED and value >= least):
        raise _refuse(
            f"`{name}` is {_cut(value)}",
            f"it must be a positive number, {f'from {least} on and ' * (least > 0)}of at most "
            f"{_MAX_ASKED:.0f}",
        )
    return float(value)


def read_speed(kwargs: Mapping[str, Any]) -> float | None:
    """Return how many frames a second a request says of videos whose frames are all seen.

    By `fps`, as qwen-vl-utils returns it. None: nothing, or one for each video (a list), which
    stands in the videos' metadata.
    """
    sampled = kwargs.get("do_sample_frames")
    if sampled is not None and sampled is not False:
        raise _refuse(
            f"`do_sample_frames` is {_cut(sampled)}",
            "this model sees all frames that it is given: leave it out, and sample those of files "
            "by `media_io_kwargs`",
        )
    fps = kwargs.get("fps")
    return None if fps is None or isinstance(fps, list | tuple) else check_fps(fps)


def check_fps(fps: Any) -> float:
    """Return a number of frames a second; `RequestValueError` for what is none."""
    return check_positive("fps", fps, MIN_FPS)


def _refuse(found: str, expected: str) -> RequestValueError:
    return RequestValueError(
        f"{found} in mm_processor_kwargs; {expected}", param="mm_processor_kwargs"
    )
