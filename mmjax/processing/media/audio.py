"""One audio clip in any form that the user may give it -> samples at the model's rate, or a file.

A file stays encoded, and decodes when it is used.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from mmjax.decoders.audio_file import resample
from mmjax.decoders.limits import MediaLimits, check_audio_size, check_num_samples
from mmjax.errors import RequestRuntimeError, RequestTypeError, RequestValueError
from mmjax.processing.media.decode import (
    FILES,
    MediaWithBytes,
    as_numpy,
    is_array_like,
    read_media,
)
from mmjax.processing.media.encoded import EncodedAudio

RESAMPLE_METHODS = ("scipy",)
_PCM_SCALES = {"uint8": 2.0**7, "int16": 2.0**15, "int32": 2.0**31}


class AudioSpec(NamedTuple):
    """What the model takes; None: whatever comes."""

    target_sr: int | float | None = None
    target_channels: int | None = None


def split_audios(data: Any) -> Sequence[Any]:
    """Return the entries of `data`, which may be one clip or several."""
    if isinstance(data, MediaWithBytes):
        return [data]
    if is_array_like(data):
        return [data] if len(data.shape) <= 1 else list(as_numpy(data))
    if not isinstance(data, list | tuple):
        return [data]
    if has_rate(data) or (data and _is_number(data[0])):
        return [data]
    return data


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def has_rate(data: Any) -> bool:
    """Return whether `data` is `(samples, sampling rate)`."""
    if not isinstance(data, tuple) or len(data) != 2:
        return False
    return _is_number(data[1]) and (isinstance(data[0], list) or is_array_like(data[0]))


def parse_audio(entry: Any, spec: AudioSpec, limits: MediaLimits, *, param: str) -> Any:
    """Return the samples as `spec` has them: `[time]`, or two axes where channels are free.

    Samples are -1..1; integer PCM (uint8, int16, int32) is scaled to that. A file (bytes, a path,
    a data URL) stays an `EncodedAudio`.
    """
    if entry is None or isinstance(entry, EncodedAudio):
        return entry
    if isinstance(entry, FILES):
        data = read_media(entry, limits, param=param, modality="audio")
        return EncodedAudio(data, limits, param)
    if isinstance(entry, MediaWithBytes) and entry.media is not None:
        samples = parse_audio(entry.media, spec, limits, param=param)
        return MediaWithBytes(samples, entry.original_bytes, entry.io_config)
    samples, rate = entry if has_rate(entry) else (entry, None)
    samples = _as_samples(samples, limits, param)
    if rate is not None:
        samples = _resample(samples, rate, spec.target_sr, limits, param)
    elif spec.target_sr is not None:
        _check_size(samples, spec.target_sr, limits, param)
    if spec.target_channels is not None:
        samples = _mix_channels(samples, spec.target_channels, param)
    return samples


def _as_samples(samples: Any, limits: MediaLimits, param: str) -> np.ndarray:
    if isinstance(samples, list | tuple):
        _check_num_samples(len(samples), limits, param)
        if not all(_is_number(sample) for sample in samples):
            raise RequestTypeError(
                f"{param} is a list that holds other things than numbers; "
                "give a list of floats, an array, or a pair (samples, sampling rate)",
                param=param,
            )
        samples = np.asarray(samples, np.float64)
    elif is_array_like(samples):
        if len(samples.shape) not in (1, 2):
            raise RequestValueError(
                f"{param} has shape {tuple(samples.shape)}; it must be (time,) or (channels, time)",
                param=param,
            )
        _check_num_samples(int(np.prod(samples.shape)), limits, param)
        samples = _as_floats(as_numpy(samples), param)
    else:
        _refuse(samples, param)
    if not np.isfinite(samples).all():
        raise RequestValueError(
            f"{param} has samples that are NaN or infinite; give finite ones", param=param
        )
    return samples


def _refuse(entry: Any, param: str) -> None:
    raise RequestTypeError(
        f"{param} has the type `{type(entry).__name__}`; give a list of floats, an array, a pair "
        "(samples, sampling rate), or a file: bytes, a path or a data URL",
        param=param,
    )


def _check_num_samples(num_samples: int, limits: MediaLimits, param: str) -> None:
    if num_samples < 1:
        raise RequestValueError(f"{param} has no samples; give at least one", param=param)
    check_num_samples(num_samples, limits, param=param)


def _as_floats(samples: np.ndarray, param: str) -> np.ndarray:
    if samples.dtype.kind == "f":
        # Wider ones (`np.longdouble`) cannot be resampled.
        return samples if samples.itemsize <= 8 else samples.astype(np.float64)
    if samples.dtype.name == "bfloat16":
        return samples.astype(np.float32)
    scale = _PCM_SCALES.get(samples.dtype.name)
    if scale is None:
        raise RequestTypeError(
            f"{param} has dtype {samples.dtype}; it must be float (-1..1), "
            "or PCM in uint8, int16 or int32",
            param=param,
        )
    middle = scale if samples.dtype == np.uint8 else 0.0
    return (samples.astype(np.float32) - np.float32(middle)) / np.float32(scale)


def _check_size(samples: np.ndarray, rate: float, limits: MediaLimits, param: str) -> None:
    """Refuse a wrong rate, too many channels, and too many seconds."""
    axis = _time_axis(samples)
    num_channels = samples.size // samples.shape[axis]
    seconds = samples.shape[axis] / rate if rate else 0.0
    check_audio_size(rate, num_channels, seconds, limits, param=param)


def _resample(
    samples: np.ndarray, rate: float, target_sr: float | None, limits: MediaLimits, param: str
) -> np.ndarray:
    """Resample along time by a polyphase filter: `ceil(time * target_sr / rate)` samples."""
    _check_size(samples, rate, limits, param)
    if target_sr is None:
        raise RequestRuntimeError(
            f"{param} comes with a sampling rate, but audio resampling is not supported when "
            "`target_sr` is not provided; give the samples alone, at the model's rate",
            param=param,
        )
    _check_num_samples(math.ceil(samples.size * target_sr / rate), limits, param)
    return resample(samples, int(rate), int(target_sr), axis=_time_axis(samples))


def _time_axis(samples: np.ndarray) -> int:
    """The longer of two axes: files have channels last, arrays of libraries channels first."""
    return 0 if samples.ndim == 1 or samples.shape[0] > samples.shape[1] else 1


def _mix_channels(samples: np.ndarray, target_channels: int, param: str) -> np.ndarray:
    """Return `[time]` for one channel, `[channels, time]` otherwise; many are averaged to one."""
    channels_first = np.atleast_2d(samples)
    if samples.ndim == 2 and _time_axis(samples) == 0:
        channels_first = samples.T
    num_channels = len(channels_first)
    if num_channels == target_channels:
        return channels_first[0] if target_channels == 1 else channels_first
    if num_channels < target_channels or target_channels > 1:
        raise RequestValueError(
            f"{param} has {num_channels} channels, the model takes {target_channels}; "
            "only a mix to one channel is made: send the channels that it takes",
            param=param,
        )
    return channels_first.mean(axis=0)


def long_clip_error(
    seconds: float, most: float, *, what: str = "a clip", modality: str = "audio"
) -> RequestValueError:
    """Return the error of sound that lasts longer than the `most` seconds that a model hears."""
    return RequestValueError(
        f"{what} lasts {seconds:.1f} s, and the model hears {most:g} s at once; cut it, and send "
        "its parts as several",
        param=f"multi_modal_data.{modality}",
    )


def unheard_clip_error(num_samples: int, rate: int, most: int) -> RequestValueError:
    """Return the error of a clip that is too short; `most`: samples of which nothing is heard."""
    return RequestValueError(
        f"a clip has {num_samples} samples, {num_samples / rate:.3f} s, of which no embedding is "
        f"made; send one of more than {most}",
        param="multi_modal_data.audio",
    )
