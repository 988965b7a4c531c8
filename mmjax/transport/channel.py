"""One-way channels between P0 and P1: ZMQ PUSH/PULL over ipc, blocking and asyncio.

Every sending end numbers its messages, in a frame before those of the codec: what is doubled is
dropped, and after a loss or another order nothing more is read (`MessagesLostError`).
"""

import asyncio
import fcntl
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from mmjax.errors import ConfigError, MMJaxError
from mmjax.system.logger import get_logger
from mmjax.transport.codec import (
    Buffer,
    Message,
    Remainder,
    WireError,
    decode,
    encode,
    read_remainder,
)

logger = get_logger(__name__)

_MAX_IPC_PATH = 100
"""A Unix socket's path may have 108 bytes; the rest is for the socket's name."""


_PREFIX = "mmjax-ipc-"
_MIN_AGE_S = 60.0
"""A younger directory may not be locked yet."""

_NUMBER = struct.Struct("<8sQI")
"""The sending end, the message's number, and the checksum of the header."""


class MessagesLostError(MMJaxError):
    """Messages between P0 and P1 were lost, or came in another order."""


class IpcDirectory:
    """A temporary directory, private to this user, for the sockets of one engine.

    The process that made it holds a lock on it. One whose processes were killed is removed when
    the next one is made.
    """

    def __init__(self) -> None:
        _remove_leftovers(Path(tempfile.gettempdir()))
        # mkdtemp creates it with mode 0700, so that other users cannot connect to its sockets.
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock: int | None = _lock(self.path)
        if len(str(self.path)) > _MAX_IPC_PATH - 20:
            self.close()
            raise ConfigError(
                "the temporary directory's path is too long for a socket; "
                "set TMPDIR to a shorter one, such as /tmp"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs; the lock stays here."""
        return {"path": self.path, "_lock": None}

    def address(self, name: str) -> str:
        """Return the address of the socket `name` in this directory."""
        return f"ipc://{self.path / name}"

    @property
    def step_record_path(self) -> Path:
        """Where P1 notes what it computes."""
        return step_record_path(self.address("in"))

    def close(self) -> None:
        """Remove the directory and the sockets in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def __enter__(self) -> "IpcDirectory":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def step_record_path(address: str) -> Path:
    """Return the path of the step record beside an engine's socket."""
    return Path(address.removeprefix("ipc://")).with_name("steps")


class _Numbering:
    """Numbers the messages of one sending end."""

    def __init__(self) -> None:
        self._end = os.urandom(8)
        self.num_sent = 0

    def wrap(self, frames: list[Buffer]) -> list[Buffer]:
        """Return the frames behind one with the next number."""
        self.num_sent += 1
        return [_NUMBER.pack(self._end, self.num_sent, zlib.crc32(frames[0])), *frames]


class _Reader:
    """Decodes the messages of one receiving end, in the order of their numbers."""

    def __init__(self) -> None:
        self._last_numbers: dict[bytes, int] = {}
        self.num_received = 0

    def read(self, frames: Sequence[zmq.Frame]) -> Message | Remainder | None:
        """Return a message, or what is left of it; None for one that has no number or came twice.

        Raises MessagesLostError if some are missing before it, or nothing is left of it.
        """
        try:
            end, number = _unpack_number([frame.buffer for frame in frames])
        except WireError as error:
            logger.error("dropped a malformed message: %s", error)
            return None
        last = self._last_numbers.get(end, 0)
        if number <= last:
            logger.error("dropped message %d, which came twice", number)
            return None
        if number > last + 1:
            raise MessagesLostError(f"message {number} came after message {last}")
        self._last_numbers[end] = number
        self.num_received += 1
        buffers = [frame.buffer for frame in frames[1:]]
        try:
            return decode(buffers)
        except WireError as error:
            remainder = read_remainder(buffers)
            if remainder is None:
                raise MessagesLostError(f"message {number}: {error}") from error
            logger.error("message %d is lost for %s: %s", number, remainder.request_ids, error)
            return remainder


def _unpack_number(frames: Sequence[Buffer]) -> tuple[bytes, int]:
    if len(frames) < 2 or len(frames[0]) != _NUMBER.size:
        raise WireError("the message has no number; expected one before its header")
    end, number, checksum = _NUMBER.unpack(frames[0])
    if zlib.crc32(frames[1]) != checksum:
        raise WireError("the header's checksum is wrong")
    return end, number


def _lock(path: Path) -> int:
    """Lock a directory of this user; OSError if it is locked, or another's."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _remove_leftovers(folder: Path) -> None:
    """Remove the directories of processes that were killed."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime < _MIN_AGE_S:
                continue
            fd = _lock(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)


class Sender:
    """The sending end. One end of a channel binds the address, the other connects."""

    def __init__(self, address: str, *, bind: bool = False) -> None:
        self._socket = _open(zmq.Context.instance(), zmq.PUSH, address, bind=bind)
        self._numbering = _Numbering()

    @property
    def num_sent(self) -> int:
        """Messages that were sent."""
        return self._numbering.num_sent

    def send(self, message: Message) -> None:
        """Queue `message`; arrays are not copied, so they must not change afterwards."""
        self._socket.send_multipart(self._numbering.wrap(encode(message)), copy=False)

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close the end; wait at most `linger_s` for what is still queued."""
        self._socket.close(linger=int(linger_s * 1000))


class Receiver:
    """The receiving end."""

    def __init__(self, address: str, *, bind: bool = False) -> None:
        self._socket = _open(zmq.Context.instance(), zmq.PULL, address, bind=bind)
        self._reader = _Reader()

    @property
    def num_received(self) -> int:
        """Messages that were received, without those that came twice."""
        return self._reader.num_received

    def receive(self, timeout_s: float | None = None) -> Message | Remainder | None:
        """Return the next message, or None after `timeout_s` (None: wait; 0: do not wait).

        A message without a number, and one that came before, is logged and dropped.
        """
        while True:
            timeout_ms = None if timeout_s is None else int(timeout_s * 1000)
            if not self._socket.poll(timeout_ms):
                return None
            message = self._reader.read(self._socket.recv_multipart(copy=False))
            if message is not None:
                return message

    def close(self) -> None:
        """Close the end; unread messages are lost."""
        self._socket.close(linger=0)


class AsyncSender:
    """`Sender` for an event loop."""

    def __init__(self, address: str, *, bind: bool = False) -> None:
        self._socket = _open(zmq.asyncio.Context.instance(), zmq.PUSH, address, bind=bind)
        self._numbering = _Numbering()

    @property
    def num_sent(self) -> int:
        """Messages that were sent, or wait for a connection."""
        return self._numbering.num_sent

    async def send(self, message: Message) -> None:
        """Queue `message`; arrays are not copied, so they must not change afterwards.

        Waits while there is no connection. The message is lost if this end is closed meanwhile.
        """
        frames = self._numbering.wrap(encode(message))
        try:
            await self._socket.send_multipart(frames, copy=False)
        except (asyncio.CancelledError, zmq.ZMQError):
            # Closing a socket cancels its waiting sends: tell that from the task's cancellation.
            task = asyncio.current_task()
            if not self._socket.closed or (task is not None and task.cancelling()):
                raise

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close the end; wait at most `linger_s` for what is still queued."""
        self._socket.close(linger=int(linger_s * 1000))


class AsyncReceiver:
    """`Receiver` for an event loop."""

    def __init__(self, address: str, *, bind: bool = False) -> None:
        self._socket = _open(zmq.asyncio.Context.instance(), zmq.PULL, address, bind=bind)
        self._reader = _Reader()

    async def receive(self) -> Message | Remainder:
        """Wait for the next message, as `Receiver.receive`."""
        while True:
            message = self._reader.read(await self._socket.recv_multipart(copy=False))
            if message is not None:
                return message

    def close(self) -> None:
        """Close the end; unread messages are lost."""
        self._socket.close(linger=0)


def _open(context: Any, kind: int, address: str, *, bind: bool) -> Any:
    socket = context.socket(kind)
    # No high-water mark: P0 admits requests by count before it sends them, and the engine must
    # never block on a slow reader.
    socket.set_hwm(0)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket
