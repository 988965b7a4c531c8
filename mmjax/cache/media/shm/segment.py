"""The shared-memory file that P0 writes and P1 reads, and who stores which word of it.

    control   magic, version, capacity, epoch, key     stored by P0
    released  one word for each page of data           stored by P1, zeroed by P0
    data      objects, each on its own pages           stored by P0; P1 maps it read-only

No lock is shared: every word has one writer, and is eight aligned bytes, which are stored and
loaded atomically.

- P0 counts in its own memory the handles of an object that it sent, P1 counts in `released` those
  that it released. P0 evicts an object only if both counts are equal. A stale load of `released`
  is too small: P0 then keeps the object for longer.
- P0 stores an object's bytes before it sends the message with its handle, and P1 loads them after
  it received that message: the socket orders the two.
- P1 stores `released` under a lock of its own, which orders its loads of the object before it.
- A word of `released` contains the epoch of its reader. P0 starts an epoch when a reader died:
  counts of an earlier epoch are ignored, and the new reader starts at 0.

The key that signs handles is in the control page: a process that can read the file can read every
object in it, so the key gives it nothing more; it is in no argument, environment variable or
message; and a restarted P1 gets it by attaching.
"""

import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mmjax.cache.media.shm.files import create_file, open_file, remove_file
from mmjax.errors import ConfigError
from mmjax.rounding import round_up

PAGE = 4096
"""Alignment of objects in bytes."""
HEADER = 64
"""Bytes before an object's arrays: mark, id, size."""

_MAGIC = int.from_bytes(b"mmjaxshm", "little")
_VERSION = 1
_WORD_MAGIC, _WORD_VERSION, _WORD_CAPACITY, _WORD_EPOCH, _WORD_MARK = range(5)
_KEY = slice(64, 96)
_COUNT_BITS = 40


class Segment:
    """A mapping of the file: P0's (`create`) or P1's (`attach`)."""

    _remove_file: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, path: Path, fd: int, capacity: int, *, is_writer: bool) -> None:
        self.path = path
        self.capacity = capacity
        """Bytes of data."""
        offset = _data_offset(capacity)
        if is_writer:
            self._maps = [mmap.mmap(fd, offset + capacity)]
            whole = memoryview(self._maps[0])
            self._control, self.data = whole[:offset], whole[offset:]
        else:
            # Read-only, so that P1 cannot change an object even by a stray write.
            data = mmap.mmap(fd, capacity, prot=mmap.PROT_READ, offset=offset)
            self._maps = [mmap.mmap(fd, offset), data]
            self._control, self.data = map(memoryview, self._maps)
        self._words, self._data_words = self._control.cast("Q"), self.data.cast("Q")
        self._mark = self._words[_WORD_MARK]
        self._fd = fd

    @classmethod
    def create(cls, capacity: int, name: str, directory: Path | None = None) -> "Segment":
        """Create the file, of `capacity` bytes of data: whole pages."""
        offset = _data_offset(capacity)
        path, fd = create_file(name, offset + capacity, directory, num_reserved=offset)
        try:
            with mmap.mmap(fd, PAGE) as page:
                _write_control(page, capacity)
            segment = cls(path, fd, capacity, is_writer=True)
        except BaseException:
            remove_file(path, fd, os.getpid())
            raise
        segment._remove_file = weakref.finalize(segment, remove_file, path, fd, os.getpid())
        return segment

    @classmethod
    def attach(cls, name: str, directory: Path | None = None) -> "Segment":
        """Map the file that P0 created."""
        path, fd = open_file(name, directory)
        try:
            return cls(path, fd, _read_capacity(path, fd), is_writer=False)
        finally:
            os.close(fd)

    @property
    def key(self) -> bytes:
        """The secret that signs handles."""
        return bytes(self._control[_KEY])

    @property
    def epoch(self) -> int:
        """Number of the current reader."""
        return self._words[_WORD_EPOCH]

    def start_epoch(self) -> None:
        """Start the next reader's epoch: releases by earlier ones are ignored."""
        self._words[_WORD_EPOCH] += 1

    # ---- one object ----------------------------------------------------------------------------

    def publish(self, address: int, object_id: int, size: int) -> None:
        """Write the header of a new object at `address`; its count of releases is 0."""
        word = address // 8
        self._data_words[word + 1] = object_id
        self._data_words[word + 2] = size
        self._data_words[word] = self._mark
        self._words[self._release_word(address)] = 0

    def erase(self, address: int) -> None:
        """Erase an object's header: its handles are stale from now on."""
        self._data_words[address // 8] = 0

    def holds(self, address: int, object_id: int, size: int) -> bool:
        """Whether this object is at `address`."""
        if address % PAGE or not HEADER <= size <= self.capacity - address:
            return False
        word = address // 8
        # The mark is secret, so that no image's bytes can be crafted to look like a header.
        return self._data_words[word : word + 3].tolist() == [self._mark, object_id, size]

    def num_released(self, address: int) -> int:
        """How many of the object's handles the current reader has released."""
        word = self._words[self._release_word(address)]
        return word & ((1 << _COUNT_BITS) - 1) if word >> _COUNT_BITS == self.epoch else 0

    def set_num_released(self, address: int, count: int, epoch: int) -> None:
        """Store how many of the object's handles the reader of `epoch` has released."""
        if epoch == self.epoch:
            self._words[self._release_word(address)] = epoch << _COUNT_BITS | count

    def back_with_memory(self, address: int, size: int) -> None:
        """Reserve pages; OSError if there are none (a store would raise SIGBUS)."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, _data_offset(self.capacity) + address, size)

    def close(self) -> None:
        """Unmap once no view needs the memory; P0 also removes the file. Idempotent."""
        self._remove_file()
        for view in (self._words, self._data_words, self._control, self.data):
            with suppress(BufferError):
                view.release()
        for mapping in self._maps:
            with suppress(BufferError):
                mapping.close()

    @staticmethod
    def _release_word(address: int) -> int:
        return (PAGE + address // PAGE * 8) // 8


def _data_offset(capacity: int) -> int:
    unit = max(PAGE, mmap.ALLOCATIONGRANULARITY)
    return round_up(PAGE + capacity // PAGE * 8, unit)


def _write_control(page: mmap.mmap, capacity: int) -> None:
    mark = secrets.randbits(63) + 1
    page[:40] = struct.pack("5Q", _MAGIC, _VERSION, capacity, 1, mark)
    page[_KEY] = secrets.token_bytes(_KEY.stop - _KEY.start)


def _read_capacity(path: Path, fd: int) -> int:
    size = os.fstat(fd).st_size
    magic = version = capacity = 0
    if size > PAGE:
        with mmap.mmap(fd, PAGE, prot=mmap.PROT_READ) as page:
            magic, version, capacity = struct.unpack_from("3Q", page)
    if (magic, version) != (_MAGIC, _VERSION) or size != _data_offset(capacity) + capacity:
        raise ConfigError(
            f"`{path}` is not a segment of version {_VERSION}; P0 and P1 must run the same mmjax"
        )
    return capacity
