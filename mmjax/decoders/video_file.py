"""A video's file -> the frames that are sampled of it, upright in RGB. FFmpeg's part, by PyAV.

Runs in the decoding processes, and in threads of `LLM`. Loads PyAV on use: few requests have one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any, Literal, NamedTuple

import numpy as np

from mmjax.decoders.image_file import BYTES_PER_PIXEL
from mmjax.decoders.limits import MediaLimits, check_bytes, check_image_size, check_video_size
from mmjax.errors import MediaError, RequestValueError

Formats = Mapping[str, tuple[int, tuple[bytes, ...]]]
"""Containers that are read: FFmpeg's name, and the bytes at a place that tell. FFmpeg is never
left to guess: some of its formats name other files, or hosts."""
VIDEO_FORMATS: Formats = {
    "mp4": (4, (b"ftyp",)),
    "matroska": (0, (b"\x1aE\xdf\xa3",)),
    "avi": (8, (b"AVI ",)),
}
SHOWN_FORMATS = "MP4, MOV, WebM, MKV, AVI"
VIDEO_CODECS = ("av1", "h264", "hevc", "libdav1d", "mjpeg", "mpeg4", "vp8", "vp9")
DEFAULT_NUM_FRAMES = 32
"""Frames that are sampled of a video, as vLLM does."""

_MAX_STREAMS = 16
_MAX_PACKETS = 1_000_000


class StreamKind(NamedTuple):
    """What is read of which files, and in which words others are refused."""

    name: Literal["audio", "video"]
    formats: Formats
    codecs: tuple[str, ...]
    shown_formats: str
    no_stream: str
    no_pyav: str
    absence: type[MediaError] = MediaError
    """What is raised of a file without such a stream."""


_VIDEO = StreamKind(
    name="video",
    formats=VIDEO_FORMATS,
    codecs=VIDEO_CODECS,
    shown_formats=SHOWN_FORMATS,
    no_stream="it has no video stream",
    no_pyav="videos need PyAV, which is not installed here; have `pip install 'mmjax[video]'` run, "
    "or send frames as `data:video/jpeg;base64,...`",
)


class VideoSampling(NamedTuple):
    """Which frames of a video are decoded: as few as either asks, evenly spread."""

    num_frames: int = DEFAULT_NUM_FRAMES
    """-1: all."""
    fps: float = -1
    """Frames of each second; -1: any number."""

    def choose(self, total: int, seconds: float) -> list[int]:
        """Return the places of the frames, of `total` in all that last `seconds`; at least one.

        As vLLM's `OpenCVVideoBackend.load_bytes`.
        """
        wanted = total
        if self.num_frames > 0:
            wanted = min(wanted, self.num_frames)
        if self.fps > 0:
            wanted = min(wanted, math.floor(seconds * self.fps))
        wanted = max(wanted, 1)
        if wanted == total:
            return list(range(total))
        return np.linspace(0, total - 1, wanted, dtype=int).tolist()


class VideoHeader(NamedTuple):
    """What is known of a video before a frame is decoded."""

    width: int
    height: int
    """Size of a frame as it is stored; it may be shown turned."""
    num_frames: int
    """Frames that are sampled."""
    total_num_frames: int
    """Frames of the file."""
    fps: float
    """Frames a second of the file; 0 where it does not say."""

    @property
    def num_decoded_bytes(self) -> int:
        """Return the memory that the sampled frames take, as images of their size."""
        return self.num_frames * self.width * self.height * BYTES_PER_PIXEL


class _Packet(NamedTuple):
    """What is known of an encoded frame before it is decoded."""

    time: int | None
    """When it is shown."""
    is_key: bool
    """Whether decoding may begin here."""
    is_shown: bool
    """False: an edit list hides it."""


def read_video_header(
    data: bytes, limits: MediaLimits, sampling: VideoSampling, *, param: str | None = "video"
) -> VideoHeader:
    """Count a video's frames without decoding one; refuse what `limits` does, and no video."""
    with _opened(data, limits, param) as (container, stream):
        return _survey(container, stream, limits, sampling, param)[0]


def decode_video(
    data: bytes,
    limits: MediaLimits,
    sampling: VideoSampling,
    *,
    put: Callable[[int, np.ndarray], None],
    param: str | None = "video",
) -> tuple[VideoHeader, list[int]]:
    """Decode the sampled frames one by one.

    Args:
        data: The file's content.
        limits: What is refused.
        sampling: Which frames.
        put: Called with each frame's place among the sampled ones, and uint8[height, width, 3].
        param: The field that is wrong where the video is.

    Returns:
        The header, and the sampled frames' places in the file.
    """
    with _opened(data, limits, param) as (container, stream):
        header, packets = _survey(container, stream, limits, sampling, param)
    indices = _choose(header, sampling)
    size: tuple[int, ...] | None = None
    num_put = 0
    # Opened again, not sought to its start: that is before the first frame in some files.
    with _opened(data, limits, param) as (container, stream):
        for place, frame in enumerate(_decode(container, stream, packets, indices)):
            pixels = _upright(frame)
            if pixels.shape != (size := size or pixels.shape):
                raise MediaError("its frames change their size", param=param)
            put(place, pixels)
            num_put += 1
    if num_put != len(indices):
        raise MediaError(f"{len(indices) - num_put} frames are damaged", param=param)
    return header, indices


def decode_frames(
    data: bytes, limits: MediaLimits, sampling: VideoSampling, *, param: str | None = "video"
) -> tuple[np.ndarray, VideoHeader, list[int]]:
    """Return uint8[frames, height, width, 3], the header, and the frames' places in the file."""
    frames: list[np.ndarray] = []
    header, indices = decode_video(
        data, limits, sampling, put=lambda place, pixels: frames.append(pixels), param=param
    )
    return np.stack(frames), header, indices


# ---- the file -----------------------------------------------------------------------------------


@contextmanager
def open_stream(data: bytes, kind: StreamKind, param: str | None) -> Iterator[tuple[Any, Any]]:
    """Yield FFmpeg's container and its first stream of a kind; whatever fails is the request's."""
    try:
        import av
    except ImportError:
        raise RequestValueError(kind.no_pyav, param=param) from None
    try:
        options = {"codec_whitelist": ",".join(kind.codecs), "max_streams": str(_MAX_STREAMS)}
        found = (n for n, (at, marks) in kind.formats.items() if data.startswith(marks, at))
        if (form := next(found, None)) is None:
            raise ValueError("its format is not recognised")
        with av.open(BytesIO(data), format=form, options=options) as container:
            streams = getattr(container.streams, kind.name)
            if not streams:
                raise kind.absence(kind.no_stream, param=param)
            codec = streams[0].codec_context
            if codec is None or codec.name not in kind.codecs:
                raise MediaError("its codec is not supported", param=param)
            codec.thread_count = 1
            yield container, streams[0]
    except RequestValueError:
        raise
    # FFmpeg's errors are OSErrors and ValueErrors of many kinds.
    except Exception as error:
        raise MediaError(
            f"Failed to load {kind.name} of {len(data)} bytes: {error}; send a whole file of one "
            f"of {kind.shown_formats}",
            param=param,
        ) from error


@contextmanager
def _opened(data: bytes, limits: MediaLimits, param: str | None) -> Iterator[tuple[Any, Any]]:
    check_bytes("video", len(data), limits, param=param)
    with open_stream(data, _VIDEO, param) as (container, stream):
        codec = stream.codec_context
        check_image_size((codec.width, codec.height), limits, param=param)
        # Frames may be larger than the header says.
        codec.options = {"max_pixels": str(limits.max_image_pixels)}
        yield container, stream


def _survey(
    container: Any, stream: Any, limits: MediaLimits, sampling: VideoSampling, param: str | None
) -> tuple[VideoHeader, list[_Packet]]:
    """Count the frames: what a file says of their number may be wrong, or missing."""
    packets: list[_Packet] = []
    for packet in container.demux(stream):
        if packet.size == 0:  # the last one
            continue
        packets.append(_Packet(packet.pts, packet.is_keyframe, not packet.is_discard))
        if len(packets) > _MAX_PACKETS:
            raise RequestValueError("video has too many frames; send a shorter one", param=param)
    total = sum(packet.is_shown for packet in packets)
    if total == 0:
        raise MediaError("it has no frames", param=param)
    rate = stream.average_rate or stream.guessed_rate
    codec = stream.codec_context
    header = VideoHeader(codec.width, codec.height, 0, total, float(rate) if rate else 0.0)
    header = header._replace(num_frames=len(_choose(header, sampling)))
    check_video_size(header.num_frames, (codec.width, codec.height), limits, param=param)
    return header, packets


def _choose(header: VideoHeader, sampling: VideoSampling) -> list[int]:
    seconds = header.total_num_frames / header.fps if header.fps else 0.0
    return sampling.choose(header.total_num_frames, seconds)


# ---- frames -------------------------------------------------------------------------------------


def _decode(
    container: Any, stream: Any, packets: Sequence[_Packet], indices: Sequence[int]
) -> Iterator[Any]:
    """Yield the frames at `indices`, in order; what lies between them is decoded if it must be."""
    times = [packet.time for packet in packets if packet.is_shown]
    known = sorted(time for time in times if time is not None)
    # AVI has no times: FFmpeg counts packets, which are in another order than what they show.
    is_reordered = container.format.name == "avi" and stream.codec_context.has_b_frames
    if len(set(known)) < len(times) or (is_reordered and known == times):
        # A file that does not say when each is shown: all are decoded, and counted.
        wanted = set(indices)
        frames = _decode_packets(container, stream, lambda number: True)
        last = max(indices)
        for place, frame in enumerate(frames):
            if place in wanted:
                yield frame
            if place == last:
                return
        return
    due = [known[index] for index in indices]
    is_needed = _find_needed(packets, frozenset(due))
    place = 0
    for frame in _decode_packets(container, stream, is_needed.__getitem__):
        # Some frames are never shown, and only others are made of them: then the next one is due.
        while place < len(due) and frame.pts is not None and frame.pts >= due[place]:
            yield frame
            place += 1
        if place == len(due):
            return


def _find_needed(packets: Sequence[_Packet], due: frozenset[int | None]) -> list[bool]:
    """Return whether each packet must be decoded: those from the key frame before a due frame on.

    A frame that is shown before its group's key frame is also made of the group before.
    """
    groups, group, key_times = [], 0, [packets[0].time]
    for number, packet in enumerate(packets):
        if packet.is_key and number > 0:
            group += 1
            key_times.append(packet.time)
        groups.append(group)
    needed = set()
    for packet, group in zip(packets, groups, strict=True):
        if packet.time in due:
            needed.add(group)
            key_time = key_times[group]
            if key_time is not None and packet.time is not None and packet.time < key_time:
                needed.add(group - 1)
    return [group in needed for group in groups]


def _decode_packets(container: Any, stream: Any, is_needed: Callable[[int], bool]) -> Iterator[Any]:
    """Yield the frames of those packets, by their number, in the order in which they are shown."""
    codec = stream.codec_context
    number, has_begun = 0, False
    for packet in container.demux(stream):
        if packet.size == 0:
            continue
        number += 1
        if is_needed(number - 1):
            has_begun = True
            yield from packet.decode()
        elif has_begun:
            yield from codec.decode(None)
            codec.flush_buffers()
            has_begun = False
    if has_begun:
        yield from codec.decode(None)


def _upright(frame: Any) -> np.ndarray:
    """Return uint8[height, width, 3]."""
    # Bicubic, for chroma that has fewer samples, as OpenCV's reader does.
    pixels = frame.to_ndarray(format="rgb24", interpolation="BICUBIC")
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
