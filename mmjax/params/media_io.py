"""What may be asked of how media are read: `media_io_kwargs`, as vLLM calls it."""

from collections.abc import Mapping
from typing import Any

MAX_SAMPLED: Mapping[str, int] = {"num_frames": 2**16, "fps": 1000}
"""The most that `media_io_kwargs` may ask; `max_video_frames` holds as well."""


def find_media_io_fault(given: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return which part of `media_io_kwargs` is wrong, as `.video.fps`, and how; None: none."""
    for modality, options in given.items():
        if modality != "video" or not isinstance(options, Mapping):
            return f".{modality[:64]}", "is not known; it has `video` alone, which is an object"
        for name, value in options.items():
            place = f".video.{str(name)[:64]}"
            kinds = {"num_frames": int, "fps": (int, float)}.get(name)
            if kinds is None:
                return place, "is not known; a video has `num_frames` and `fps`"
            is_number = isinstance(value, kinds) and not isinstance(value, bool)
            if not is_number or not (value == -1 or 0 < value <= MAX_SAMPLED[name]):
                return place, f"must be -1, or above 0 and at most {MAX_SAMPLED[name]}"
    return None
