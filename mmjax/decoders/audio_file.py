"""A clip's file -> its samples, mixed to one channel, at the rate that is asked for. FFmpeg's part.

Runs in the decoding processes, and in threads of `LLM`. Loads PyAV and scipy on use: few requests
have one.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from mmjax.decoders.limits import MediaLimits, check_audio_size, check_bytes, check_num_samples
from mmjax.decoders.video_file import VIDEO_FORMATS, Formats, StreamKind, open_stream
from mmjax.errors import MediaError, RequestValueError

AUDIO_FORMATS: Formats = {
    "wav": (8, (b"WAVE",)),
    "flac": (0, (b"fLaC",)),
    "ogg": (0, (b"OggS",)),
    "matroska": (0, (b"\x1aE\xdf\xa3",)),
    "mp4": (4, (b"ftyp",)),
    # Its own frames have no name: eleven bits that are set, and a layer.
    "mp3": (0, (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"\xff\xfa", b"\xff\xe3")),
}
SHOWN_AUDIO_FORMATS = "WAV, FLAC, MP3, OGG, WebM, M4A"
AUDIO_CODECS = (
    *("aac", "flac", "libopus", "libvorbis", "mp3", "mp3float", "opus", "vorbis"),
    *("pcm_alaw", "pcm_f32le", "pcm_f64le", "pcm_mulaw"),
    *("pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_u8"),
)
BYTES_PER_SAMPLE = 4
"""Of a decoded sample: float32."""

_MAX_PACKETS = 2_000_000
_MAX_DURATION = 2**31
_SLACK_S = 1.0
"""How much longer a clip may be than its packets say: encoders add some milliseconds at the end."""
_SCALES = {"u1": 2.0**7, "i2": 2.0**15, "i4": 2.0**31}


class _SilentError(MediaError):
    """A video without a stream of sound."""


_CLIP = StreamKind(
    name="audio",
    formats=AUDIO_FORMATS,
    codecs=AUDIO_CODECS,
    shown_formats=SHOWN_AUDIO_FORMATS,
    no_stream="it has no sound",
    no_pyav="clips need PyAV, which is not installed here; have `pip install 'mmjax[video]'` run",
)
_SOUND = _CLIP._replace(formats=VIDEO_FORMATS, absence=_SilentError)
"""A video's."""


class AudioHeader(NamedTuple):
    """What is known of a clip before a sample is decoded."""

    rate: int
    """Samples a second."""
    num_channels: int
    seconds: float
    """Of all packets."""

    def count_samples(self, rate: int) -> int:
        """Return about how many samples it has at a rate, once it is mixed to one channel."""
        return math.ceil(self.seconds * rate)


def read_audio_header(
    data: bytes, limits: MediaLimits, *, param: str | None = "audio"
) -> AudioHeader:
    """Measure a clip without decoding it; refuse what `limits` does, and no clip."""
    with _opened(data, limits, param) as (container, stream):
        return _survey(container, stream, limits, param)


def decode_audio(
    data: bytes, limits: MediaLimits, rate: int, *, param: str | None = "audio"
) -> np.ndarray:
    """Return float32[T]: the samples, -1..1, the mean of all channels, `rate` of them a second.

    Args:
        data: The file's content.
        limits: What is refused.
        rate: The rate that is wanted.
        param: The field that is wrong where the clip is.
    """
    return _decode_all(data, limits, rate, param)


def read_sound_header(
    data: bytes, limits: MediaLimits, *, param: str | None = "video"
) -> AudioHeader | None:
    """Measure the sound of a video, as `read_audio_header` a clip; None: it has none."""
    try:
        with _opened(data, limits, param, "video") as (container, stream):
            return _survey(container, stream, limits, param)
    except _SilentError:
        return None


def decode_sound(
    data: bytes, limits: MediaLimits, rate: int, *, param: str | None = "video"
) -> np.ndarray:
    """Return the samples of a video's sound, as `decode_audio` a clip's; none where it is silent.

    The limits of clips hold for it, but for the file's bytes, which are the video's.
    """
    try:
        return _decode_all(data, limits, rate, param, "video")
    except _SilentError:
        return np.empty(0, np.float32)


def resample(samples: np.ndarray, rate: int, target_rate: int, *, axis: int = 0) -> np.ndarray:
    """Resample along `axis` by a polyphase filter: `ceil(time * target_rate / rate)` samples."""
    common = gcd(target_rate, rate)
    up, down = target_rate // common, rate // common
    if up == down:
        return samples
    # On use only: importing it takes longer than resampling.
    from scipy.signal import resample_poly

    return resample_poly(samples, up, down, axis=axis)


# ---- the file -----------------------------------------------------------------------------------


def _decode_all(
    data: bytes, limits: MediaLimits, rate: int, param: str | None, modality: str = "audio"
) -> np.ndarray:
    with _opened(data, limits, param, modality) as (container, stream):
        header = _survey(container, stream, limits, param)
    check_num_samples(header.count_samples(rate), limits, param=param)
    # Opened again, not sought to its start: not every file can be.
    with _opened(data, limits, param, modality) as (container, stream):
        samples, own_rate = _decode(container, stream, header, limits, param)
    return resample(samples, own_rate, rate)


@contextmanager
def _opened(
    data: bytes, limits: MediaLimits, param: str | None, modality: str = "audio"
) -> Iterator[tuple[Any, Any]]:
    check_bytes(modality, len(data), limits, param=param)
    kind = _SOUND if modality == "video" else _CLIP
    with open_stream(data, kind, param) as (container, stream):
        codec = stream.codec_context
        check_audio_size(codec.sample_rate or 0, codec.channels, 0.0, limits, param=param)
        yield container, stream


def _survey(container: Any, stream: Any, limits: MediaLimits, param: str | None) -> AudioHeader:
    """Add up what the packets last: what a file says of its length may be wrong, or missing."""
    total, num_packets, is_known = 0, 0, True
    first: int | None = None
    last = 0
    for packet in container.demux(stream):
        if packet.size == 0:  # the last one
            continue
        num_packets += 1
        if num_packets > _MAX_PACKETS:
            raise RequestValueError("audio has too many packets; send a shorter one", param=param)
        # FFmpeg makes huge numbers of negative ones, which some writers' last packets have.
        duration = packet.duration if 0 < (packet.duration or 0) < _MAX_DURATION else 0
        total += duration
        is_known = is_known and duration > 0
        if packet.pts is not None:
            first = packet.pts if first is None else min(first, packet.pts)
            last = max(last, packet.pts + duration)
    if num_packets == 0:
        raise MediaError("it has no samples", param=param)
    if not is_known and first is not None:
        total = max(total, last - first)
    codec = stream.codec_context
    header = AudioHeader(codec.sample_rate, codec.channels, float(total * stream.time_base))
    check_audio_size(*header, limits, param=param)
    return header


# ---- samples ------------------------------------------------------------------------------------


def _decode(
    container: Any, stream: Any, header: AudioHeader, limits: MediaLimits, param: str | None
) -> tuple[np.ndarray, int]:
    """Return float32[T] and its rate, which the first frame tells: some codecs double it."""
    samples, place, first = np.empty(0, np.float32), 0, None
    for frame in container.decode(stream):
        shape = (frame.sample_rate, frame.layout.nb_channels)
        if first is None:
            first = shape
            check_audio_size(*shape, header.seconds, limits, param=param)
            samples = np.empty(math.ceil((header.seconds + _SLACK_S) * shape[0]), np.float32)
        if shape != first:
            raise MediaError("its sampling rate or its channels change", param=param)
        mixed = _mix(frame)
        if place + len(mixed) > len(samples):
            raise MediaError("it is longer than its packets say", param=param)
        samples[place : place + len(mixed)] = mixed
        place += len(mixed)
    if first is None or place == 0:
        raise MediaError("it has no samples", param=param)
    samples = samples[:place]
    if not np.isfinite(samples).all():
        raise MediaError("it has samples that are NaN or infinite", param=param)
    return samples, first[0]


def _mix(frame: Any) -> np.ndarray:
    """Return float32[T] of one frame: the mean of its channels."""
    array = frame.to_ndarray()
    if not frame.format.is_planar:  # [1, T * C]
        array = array.reshape(-1, frame.layout.nb_channels).T
    scale = _SCALES.get(array.dtype.str[1:])
    mixed = array.mean(axis=0, dtype=np.float32)
    if scale is None:
        return mixed
    middle = np.float32(scale if array.dtype == np.uint8 else 0.0)
    return (mixed - middle) / np.float32(scale)
