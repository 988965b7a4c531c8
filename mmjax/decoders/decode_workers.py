"""Media are decoded in worker processes: what the server asks of them; see `media_jobs`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from PIL import Image

from mmjax.decoders.audio_file import AudioHeader
from mmjax.decoders.image_file import BYTES_PER_PIXEL, ImageHeader
from mmjax.decoders.limits import (
    MediaLimits,
    check_audio_size,
    check_bytes,
    check_image_size,
    check_num_samples,
    check_video_size,
)
from mmjax.decoders.media_jobs import SHARED_MODE
from mmjax.decoders.shared_memory import SharedMemory
from mmjax.decoders.video_file import VideoHeader, VideoSampling
from mmjax.decoders.worker_pool import WorkerError, WorkerPool
from mmjax.errors import MediaError, RequestValueError

_FAULTS = {
    "time": "it takes too long to decode",
    "memory": "it takes too much memory to decode",
}


class DecodeWorkers:
    """Processes that decode media; they raise what the functions of the same names raise."""

    def __init__(self, num_workers: int, *, timeout_s: float, memory_bytes: int) -> None:
        """Start the processes, without waiting for them; see `WorkerPool`."""
        self._pool = WorkerPool(
            "media", num_workers, timeout_s=timeout_s, memory_bytes=memory_bytes, starts_now=True
        )

    def read_header(self, data: bytes, limits: MediaLimits, *, param: str | None) -> ImageHeader:
        """Return what a file says of its image."""
        with self._ask("read_image_header", data, limits, param) as (reply, _):
            return _checked_header(reply, limits)

    def decode_image(
        self, data: bytes, limits: MediaLimits, *, param: str | None
    ) -> tuple[Image.Image, ImageHeader]:
        """Return the first frame and its header."""
        with self._ask("decode_image", data, limits, param) as (reply, memory):
            header = _checked_header(reply, limits)
            width, height = _integers(reply["size"], 2)
            check_image_size((width, height), limits, param=param)
            with memory.view(width * height * BYTES_PER_PIXEL) as pixels:
                image = Image.frombytes("RGB", (width, height), pixels, "raw", SHARED_MODE)
                return image, header

    def read_video_header(
        self, data: bytes, limits: MediaLimits, sampling: VideoSampling, *, param: str | None
    ) -> VideoHeader:
        """Return what is known of a video before a frame is decoded."""
        with self._ask("read_video_header", data, limits, param, sampling=sampling) as (reply, _):
            return _checked_video_header(reply, limits)

    def decode_frames(
        self, data: bytes, limits: MediaLimits, sampling: VideoSampling, *, param: str | None
    ) -> tuple[np.ndarray, VideoHeader, list[int]]:
        """Return a video's sampled frames, its header, and their places in the file."""
        with self._ask("decode_video", data, limits, param, sampling=sampling) as (reply, memory):
            header = _checked_video_header(reply, limits)
            width, height = _integers(reply["size"], 2)
            check_video_size(header.num_frames, (width, height), limits, param=param)
            indices = _integers(reply["indices"], header.num_frames)
            frames = np.empty((header.num_frames, height, width, 3), np.uint8)
            memory.read_into(frames.reshape(-1).data)
            return frames, header, indices

    def read_audio_header(
        self, data: bytes, limits: MediaLimits, *, param: str | None
    ) -> AudioHeader:
        """Return what is known of a clip before a sample is decoded."""
        with self._ask("read_audio_header", data, limits, param) as (reply, _):
            return _checked_audio_header(reply, limits)

    def decode_audio(
        self, data: bytes, limits: MediaLimits, rate: int, *, param: str | None
    ) -> np.ndarray:
        """Return a clip's samples: one channel, at `rate`."""
        with self._ask("decode_audio", data, limits, param, rate=rate) as (reply, memory):
            samples = _checked_samples(reply, memory, limits, param)
            if not len(samples):
                raise ValueError("a worker process gave a wrong reply")
            return samples

    def read_sound_header(
        self, data: bytes, limits: MediaLimits, *, param: str | None
    ) -> AudioHeader | None:
        """Return what is known of a video's sound; None: it has none."""
        with self._ask("read_video_sound", data, limits, param) as (reply, _):
            return None if reply["header"] is None else _checked_audio_header(reply, limits)

    def decode_sound(
        self, data: bytes, limits: MediaLimits, rate: int, *, param: str | None
    ) -> np.ndarray:
        """Return a video's sound: one channel, at `rate`; no samples where it is silent."""
        with self._ask("decode_video_sound", data, limits, param, rate=rate) as (reply, memory):
            return _checked_samples(reply, memory, limits, param)

    def close(self) -> None:
        """End the processes; whoever waits for one gets an error."""
        self._pool.close()

    @contextmanager
    def _ask(
        self, operation: str, data: bytes, limits: MediaLimits, param: str | None, **options: Any
    ) -> Iterator[tuple[Mapping[str, Any], SharedMemory]]:
        _, modality, *_ = operation.split("_")
        check_bytes(modality, len(data), limits, param=param)
        try:
            with self._pool.run(operation, data, **options, **asdict(limits)) as (reply, memory):
                if (kind := reply.get("error")) is not None:
                    error = RequestValueError if kind == "value" else MediaError
                    raise error(str(reply.get("message")), param=param)
                yield reply, memory
        except WorkerError as error:
            raise MediaError(
                _FAULTS.get(error.reason, "the decoder failed on it"), param=param
            ) from None


def _checked_header(reply: Mapping[str, Any], limits: MediaLimits) -> ImageHeader:
    *sizes, has_transparency, is_turned = reply["header"]
    width, height = _integers(sizes, 2)
    if has_transparency not in (True, False) or is_turned not in (True, False, None):
        raise ValueError("a worker process gave a wrong reply")
    check_image_size((width, height), limits)
    return ImageHeader(width, height, has_transparency, is_turned)


def _checked_video_header(reply: Mapping[str, Any], limits: MediaLimits) -> VideoHeader:
    *sizes, fps = reply["header"]
    width, height, num_frames, total = _integers(sizes, 4)
    check_video_size(num_frames, (width, height), limits)
    if not (isinstance(fps, float) and math.isfinite(fps) and fps >= 0):
        raise ValueError("a worker process gave a wrong reply")
    return VideoHeader(width, height, num_frames, total, fps)


def _checked_audio_header(reply: Mapping[str, Any], limits: MediaLimits) -> AudioHeader:
    *sizes, seconds = reply["header"]
    rate, num_channels = _integers(sizes, 2)
    if not (isinstance(seconds, float) and math.isfinite(seconds) and seconds >= 0):
        raise ValueError("a worker process gave a wrong reply")
    check_audio_size(rate, num_channels, seconds, limits)
    return AudioHeader(rate, num_channels, seconds)


def _checked_samples(
    reply: Mapping[str, Any], memory: SharedMemory, limits: MediaLimits, param: str | None
) -> np.ndarray:
    (num_samples,) = _integers([reply["num_samples"]], 1)
    check_num_samples(num_samples, limits, param=param)
    samples = np.empty(num_samples, np.float32)
    memory.read_into(samples.view(np.uint8).data)
    if not np.isfinite(samples).all():
        raise ValueError("a worker process gave a wrong reply")
    return samples


def _integers(values: Sequence[Any], count: int) -> list[int]:
    if len(values) != count or not all(isinstance(one, int) and one >= 0 for one in values):
        raise ValueError("a worker process gave a wrong reply")
    return list(values)
