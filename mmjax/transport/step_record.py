"""What P1 computes at present, in a file that outlives it: P0 reads it after P1's end.

Two slots of a mapped file, written in turns, each with a number and a checksum: an end in the
middle of a write leaves the slot of the write before. Knows nothing of what the ids stand for.
"""

import contextlib
import mmap
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mmjax.system.logger import get_logger

logger = get_logger(__name__)

SLOT_BYTES = 64 * 2**10
_HEADER = struct.Struct("<QII")
"""The write's number, the length of what follows, and the checksum of both and of that."""


def create_step_record(path: Path) -> None:
    """Create the file with all its blocks, since a write to a mapped hole of a full disk kills."""
    try:
        path.write_bytes(bytes(2 * SLOT_BYTES))
    except OSError as error:
        path.unlink(missing_ok=True)
        logger.warning("requests that end the engine cannot be told apart (%s)", error.strerror)


class StepRecord:
    """P1's end of a record; without a file, notes go nowhere."""

    def __init__(self, path: Path) -> None:
        self._memory: mmap.mmap | None = None
        self._last: tuple[str, ...] = ()
        self._number = 0
        with contextlib.suppress(OSError), path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 2 * SLOT_BYTES)

    def write(self, request_ids: Sequence[str]) -> None:
        """Note what is computed from now on."""
        ids = tuple(request_ids)
        if self._memory is None or ids == self._last:
            return
        self._last = ids
        self._number += 1
        content = msgspec.msgpack.encode(ids)
        if len(content) > SLOT_BYTES - _HEADER.size:
            content = msgspec.msgpack.encode(())
        checksum = _checksum(self._number, content)
        header = _HEADER.pack(self._number, len(content), checksum)
        start = self._number % 2 * SLOT_BYTES
        self._memory[start : start + len(header) + len(content)] = header + content

    @property
    def request_ids(self) -> tuple[str, ...]:
        """What was written last."""
        return self._last

    def close(self) -> None:
        """Unmap the file."""
        if self._memory is not None:
            self._memory.close()


def read_step_record(path: Path) -> tuple[str, ...]:
    """Return what P1 noted last; nothing where that cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return ()
    slots = [_read_slot(content[start:][:SLOT_BYTES]) for start in (0, SLOT_BYTES)]
    return max(slots)[1]


def _checksum(number: int, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(struct.pack("<QI", number, len(content))))


def _read_slot(slot: bytes) -> tuple[int, tuple[str, ...]]:
    if len(slot) < _HEADER.size:
        return 0, ()
    number, length, checksum = _HEADER.unpack_from(slot)
    content = slot[_HEADER.size : _HEADER.size + length]
    if _checksum(number, content) != checksum:
        return 0, ()
    try:
        return number, msgspec.msgpack.decode(content, type=tuple[str, ...])
    except msgspec.MsgspecError:
        return 0, ()
