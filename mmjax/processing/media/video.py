"""One video in any form that the user may give it -> its frames, and what is known of them.

Frames are taken, files are not: nothing here decodes a container.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from mmjax.decoders.limits import MediaLimits, check_video_size
from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.processing.media.decode import (
    CHANNELS,
    FILES,
    MediaWithBytes,
    as_numpy,
    image_from_array,
    is_array_like,
    iter_frames,
    video_as_uint8,
)
from mmjax.processing.media.encoded import parse_image


class Video(NamedTuple):
    """What one entry of the user's videos holds."""

    frames: Any
    """An array of four axes, one of them the channels; None where a uuid stands for it."""
    metadata: Mapping[str, Any] | None


def split_videos(data: Any) -> Sequence[Any]:
    """Return the entries of `data`, which may be one video or several."""
    if _is_single_video(data):
        return [data]
    if is_array_like(data) and len(data.shape) == 5:
        return list(as_numpy(data))
    return data if isinstance(data, list | tuple) else [data]


def _is_single_video(data: Any) -> bool:
    if isinstance(data, list | tuple) and data:
        return _is_with_metadata(data) or all(_is_frame(entry) for entry in data)
    return False


def _is_with_metadata(data: Any) -> bool:
    """Whether `data` is `(frames, metadata)`; `(None, None)` is two items without data."""
    if not isinstance(data, tuple) or len(data) != 2 or data[0] is None:
        return False
    return data[1] is None or isinstance(data[1], Mapping)


def _is_frame(entry: Any) -> bool:
    return isinstance(entry, Image.Image) or (is_array_like(entry) and len(entry.shape) == 3)


def parse_video(entry: Any, limits: MediaLimits, *, param: str) -> Video:
    """Return the frames, checked against `limits`; an array stays the object that it is."""
    if entry is None:
        return Video(None, None)
    if isinstance(entry, MediaWithBytes) and entry.media is not None:
        inner = parse_video(entry.media, limits, param=param)
        frames = MediaWithBytes(inner.frames, entry.original_bytes, entry.io_config)
        return Video(frames, inner.metadata)
    if _is_with_metadata(entry):
        frames, metadata = entry
        inner = parse_video(frames, limits, param=param)
        return Video(inner.frames, inner.metadata if metadata is None else metadata)
    if isinstance(entry, FILES):
        raise RequestTypeError(
            f"{param} is an encoded video (`{type(entry).__name__}`), which is not decoded here; "
            "give its frames: a list of PIL images or one array (a `video_url` part of a message "
            "takes a file)",
            param=param,
        )
    if isinstance(entry, list | tuple):
        return Video(_stack_frames(entry, limits, param), None)
    if not is_array_like(entry):
        raise RequestTypeError(
            f"{param} has the type `{type(entry).__name__}`; give a list of PIL images or of "
            "arrays, one array, or a pair (frames, metadata)",
            param=param,
        )
    _check_shape(tuple(entry.shape), limits, param)
    _check_values(entry, limits, param)
    return Video(entry, None)


def _stack_frames(frames: Sequence[Any], limits: MediaLimits, param: str) -> np.ndarray:
    """Return images of one size as one array."""
    for index, frame in enumerate(frames):
        if not _is_frame(frame):
            raise RequestTypeError(
                f"frame {index} of {param} has the type `{type(frame).__name__}`; "
                "give PIL images or arrays of 3 axes",
                param=param,
            )
    sizes = _check_alike(frames, param)
    if frames and isinstance(frames[0], Image.Image):
        width, height = frames[0].size
        _check_shape((len(frames), height, width, 3), limits, param)
        images = [np.asarray(parse_image(frame, limits, param=param)) for frame in frames]
        _check_alike(images, param)  # again: some may be turned
        return np.stack(images)
    _check_shape((len(frames), *next(iter(sizes), (0, 0, 3))), limits, param)
    stacked = np.stack([as_numpy(frame) for frame in frames])
    _check_values(stacked, limits, param)
    return stacked


def _check_alike(frames: Sequence[Any], param: str) -> list[tuple[int, ...]]:
    """Return the frames' size; `RequestValueError` for several."""
    sizes = {
        frame.size if isinstance(frame, Image.Image) else tuple(frame.shape): None
        for frame in frames
    }
    if len(sizes) > 1:
        raise RequestValueError(
            f"the frames of {param} have the shapes {', '.join(map(str, sizes))}; "
            "scale them to one",
            param=param,
        )
    return list(sizes)


def _check_shape(shape: tuple[int, ...], limits: MediaLimits, param: str) -> None:
    if len(shape) != 4 or not {shape[1], shape[-1]} & set(CHANNELS):
        raise RequestValueError(
            f"{param} has shape {shape}; it must be (frames, height, width, channels) or "
            "(frames, channels, height, width) with 1, 3 or 4 channels",
            param=param,
        )
    height, width = shape[1:3] if shape[-1] in CHANNELS else shape[2:]
    check_video_size(shape[0], (width, height), limits, param=param)


def _check_values(frames: Any, limits: MediaLimits, param: str) -> None:
    """Refuse values that are no pixels; uint8 needs no look."""
    pixels = as_numpy(frames)
    if pixels.dtype != np.uint8:
        for frame in iter_frames(pixels):
            image_from_array(frame, limits, param=param)


def parse_vision_chunk(entry: Any, limits: MediaLimits, *, param: str) -> Mapping[str, Any] | None:
    """Return an image, or a piece of a video as a list of images, with its other keys."""
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise RequestTypeError(
            f"{param} has the type `{type(entry).__name__}`; give a dict with `type`", param=param
        )
    kind = entry.get("type")
    # Not `kind in (...)`: an array compares element by element.
    is_known = isinstance(kind, str) and kind in ("image", "video_chunk")
    if not is_known or entry.get(kind) is None:
        raise RequestValueError(
            f"{param} has the type {repr(kind)[:64]} and the keys {sorted(map(str, entry))}; "
            'give {"type": "image", "image": ...} or {"type": "video_chunk", "video_chunk": ...}',
            param=param,
        )
    if kind == "image":
        return {**entry, "image": parse_image(entry["image"], limits, param=param)}
    frames = video_as_uint8(parse_video(entry["video_chunk"], limits, param=param).frames)
    return {**entry, "video_chunk": [Image.fromarray(frame) for frame in frames]}
