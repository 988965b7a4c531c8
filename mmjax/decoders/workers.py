"""Processes that decode media for the server: a decoder's fault costs one request, not the server.

A thread that needs a file decoded takes an idle process, puts the file into the memory that both
share, waits, and copies the pixels out. What the process says is not trusted: sizes are checked,
and the memory cannot shrink while it is mapped.
"""

import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import numpy as np
from PIL import Image

from mmjax.decoders.image_file import BYTES_PER_PIXEL, ImageHeader
from mmjax.decoders.limits import (
    MediaLimits,
    check_image_bytes,
    check_image_size,
    check_video_bytes,
    check_video_size,
)
from mmjax.decoders.shared_memory import create_shared_memory
from mmjax.decoders.video_file import VideoHeader, VideoSampling
from mmjax.decoders.worker import MAX_MESSAGE_BYTES, SHARED_MODE
from mmjax.errors import MediaError, RequestValueError
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

_KEPT_BYTES = 32 * 2**20
"""Shared memory that an idle process keeps; new pages cost a quarter of the time that a JPEG of two
megapixels takes."""

_START_TIMEOUT_S = 60.0
_SIGNALS_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""As exit statuses."""
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME")
"""Of the environment: no keys."""


class DecodeWorkers:
    """A fixed number of decoding processes; many threads share them."""

    def __init__(self, num_workers: int, *, timeout_s: float, memory_bytes: int) -> None:
        """Start the processes, without waiting for them.

        Args:
            num_workers: At least 1.
            timeout_s: Seconds that one file may take.
            memory_bytes: What decoding may take, beside the shared memory.
        """
        self._timeout_s = timeout_s
        self._workers = [_Worker(memory_bytes) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            worker.start()
            self._idle.put(worker)

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def read_header(self, data: bytes, limits: MediaLimits, *, param: str | None) -> ImageHeader:
        """Return what a file says of its image; RequestError as `read_image_header` raises."""
        with self._borrow() as worker:
            return _checked_header(self._call(worker, "read_header", data, limits, param), limits)

    def decode_image(
        self, data: bytes, limits: MediaLimits, *, param: str | None
    ) -> tuple[Image.Image, ImageHeader]:
        """Return the first frame and its header; RequestError as `decode_image` raises."""
        check_image_bytes(len(data), limits, param=param)
        with self._borrow() as worker:
            reply = self._call(worker, "decode_image", data, limits, param)
            header = _checked_header(reply, limits)
            width, height = _integers(reply["size"], 2)
            check_image_size((width, height), limits, param=param)
            with worker.view(width * height * BYTES_PER_PIXEL) as pixels:
                return Image.frombytes("RGB", (width, height), pixels, "raw", SHARED_MODE), header

    def read_video_header(
        self, data: bytes, limits: MediaLimits, sampling: VideoSampling, *, param: str | None
    ) -> VideoHeader:
        """Return what is known of a video before a frame is decoded, as `read_video_header`."""
        check_video_bytes(len(data), limits, param=param)
        with self._borrow() as worker:
            reply = self._call(worker, "read_video_header", data, limits, param, sampling=sampling)
            return _checked_video_header(reply, limits)

    def decode_frames(
        self, data: bytes, limits: MediaLimits, sampling: VideoSampling, *, param: str | None
    ) -> tuple[np.ndarray, VideoHeader, list[int]]:
        """Return a video's sampled frames, its header and their places, as `decode_frames`."""
        check_video_bytes(len(data), limits, param=param)
        with self._borrow() as worker:
            reply = self._call(worker, "decode_video", data, limits, param, sampling=sampling)
            header = _checked_video_header(reply, limits)
            width, height = _integers(reply["size"], 2)
            check_video_size(header.num_frames, (width, height), limits, param=param)
            indices = _integers(reply["indices"], header.num_frames)
            frames = np.empty((header.num_frames, height, width, 3), np.uint8)
            worker.read_into(frames.reshape(-1).data, 0)
            return frames, header, indices

    def close(self) -> None:
        """End the processes; whoever waits for one gets an error."""
        for worker in self._workers:
            worker.close()

    @contextmanager
    def _borrow(self) -> Iterator["_Worker"]:
        worker = self._idle.get()
        try:
            yield worker
        except RequestValueError:
            raise
        except (KeyError, OSError, TypeError, ValueError) as error:
            worker.stop()
            logger.error("a decoding process gave a wrong reply: %s", type(error).__name__)
            raise MediaError("the decoder failed on it") from None
        except BaseException:
            worker.stop()
            raise
        finally:
            worker.drop_memory()
            self._idle.put(worker)

    def _call(
        self,
        worker: "_Worker",
        operation: str,
        data: bytes,
        limits: MediaLimits,
        param: str | None,
        *,
        may_repeat: bool = True,
        **options: Any,
    ) -> Mapping[str, Any]:
        request = {
            "operation": operation,
            "num_bytes": len(data),
            "limits": asdict(limits),
            "options": options,
        }
        try:
            reply = worker.call(request, data, self._timeout_s)
        except TimeoutError:
            worker.stop()
            logger.warning("a file took more than %g s to decode: given up", self._timeout_s)
            raise MediaError("it takes too long to decode", param=param) from None
        except OSError:
            status = worker.stop()
            logger.warning("a decoding process ended with status %s; another one starts", status)
            if may_repeat and status in _SIGNALS_FROM_OUTSIDE:
                # Not the file's doing, most likely; if it is, it costs two processes.
                return self._call(
                    worker, operation, data, limits, param, may_repeat=False, **options
                )
            raise MediaError("the decoder failed on it", param=param) from None
        match reply.get("error"):
            case None:
                return reply
            case "memory":
                worker.stop()
                logger.warning("a file took more memory to decode than it may")
                raise MediaError("it takes too much memory to decode", param=param)
            case "value":
                raise RequestValueError(str(reply.get("message")), param=param)
            case _:
                raise MediaError(str(reply.get("message")), param=param)


def _checked_header(reply: Mapping[str, Any], limits: MediaLimits) -> ImageHeader:
    width, height, has_transparency = _integers(reply["header"], 3)
    check_image_size((width, height), limits)
    return ImageHeader(width, height, bool(has_transparency))


def _checked_video_header(reply: Mapping[str, Any], limits: MediaLimits) -> VideoHeader:
    *sizes, fps = reply["header"]
    width, height, num_frames, total = _integers(sizes, 4)
    check_video_size(num_frames, (width, height), limits)
    if not (isinstance(fps, float) and math.isfinite(fps) and fps >= 0):
        raise ValueError("a decoding process gave a wrong reply")
    return VideoHeader(width, height, num_frames, total, fps)


def _integers(values: Sequence[Any], count: int) -> list[int]:
    if len(values) != count or not all(isinstance(one, int) and one >= 0 for one in values):
        raise ValueError("a decoding process gave a wrong reply")
    return list(values)


class _Worker:
    """One process, used by one thread at a time; started again when it is needed."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._memory = create_shared_memory()
        self._channel: socket.socket | None = None
        self._is_closed = False
        self._is_ready = False
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> socket.socket:
        """Start a process, which says when it is ready; return the socket to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = (theirs.fileno(), self._memory.descriptor)
            arguments = [str(number) for number in (*descriptors, self._memory_bytes)]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mmjax.decoders.worker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=descriptors,
                # Ctrl-C is for the server, which drains.
                start_new_session=True,
                env=_environment(),
            )
        self._channel, self._is_ready = ours, False
        return ours

    def call(self, request: Mapping[str, Any], data: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a request about `data`; OSError if the process has ended, TimeoutError if slow."""
        if self._is_closed:
            raise ConnectionResetError
        channel = self._channel or self.start()
        if not self._is_ready:
            _receive(channel, _START_TIMEOUT_S)
            self._is_ready = True
        place = 0
        while place < len(data):
            place += os.pwrite(self._memory.descriptor, memoryview(data)[place:], place)
        channel.send(json.dumps(request).encode())
        return _receive(channel, timeout_s)

    def view(self, num_bytes: int) -> memoryview:
        """Return the beginning of the shared memory; to be released before the next call."""
        return self._memory.view(num_bytes)

    def read_into(self, view: memoryview, place: int) -> None:
        """Fill `view` with the shared memory from `place` on."""
        num_read = 0
        while num_read < len(view):
            count = os.preadv(self._memory.descriptor, [view[num_read:]], place + num_read)
            if count == 0:
                raise ValueError("a decoding process gave too few pixels")
            num_read += count

    def drop_memory(self) -> None:
        """Free what a large file took."""
        if self._is_closed or self._memory.num_used_bytes <= _KEPT_BYTES:
            return
        try:
            self._memory.free()
        except (OSError, ValueError):
            self.stop()
            self._memory.close()
            self._memory = create_shared_memory()

    def stop(self) -> int | None:
        """Kill the process, if there is one; the next call starts another."""
        process, channel = self.process, self._channel
        self.process = self._channel = None
        if channel is not None:
            channel.close()
        if process is None:
            return None
        with suppress(ProcessLookupError):
            process.kill()
        return process.wait()

    def close(self) -> None:
        """Kill the process for good. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.stop()
            self._memory.close()


def _receive(channel: socket.socket, timeout_s: float) -> dict[str, Any]:
    channel.settimeout(timeout_s)
    reply = channel.recv(MAX_MESSAGE_BYTES)
    if not reply:
        raise ConnectionResetError
    return json.loads(reply)


def _environment() -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    # Packages are found where this process found them, also in a checkout that is not installed.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    return {**passed, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
