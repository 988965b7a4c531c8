"""A cache on disk that outlives its process, and that several processes may share.

A file holds what was put by one key. It is written beside its place and then renamed, so nobody
sees half of it, and every byte of it is checked when it is read: what is damaged, truncated or
foreign is a miss, never an answer and never an exception. Knows nothing of what it keeps.
"""

import os
import re
import secrets
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from mmjax.errors import ConfigError
from mmjax.rounding import round_up
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

Part = bytes | memoryview
"""C-contiguous; of an array `x`, `x.reshape(-1).view(np.uint8).data`."""

FORMAT_VERSION = 1
ALIGNMENT = 64
"""Contents begin at a multiple of it."""
MAX_PENDING_BYTES = 256 * 2**20
"""What may wait for the writer; beyond it nothing is written."""
_HEAD = struct.Struct("<8sIIQ32s32s")
"""Magic, version, length of the key, length of the content, digests of namespace and content."""
_MAGIC = b"mmjaxSTO"
_NAME = re.compile(r"[0-9a-f]{64}\.mmjax")
_UNFINISHED_NAME = re.compile(r"[0-9a-f]{32}\.mmjax-new")
_UNFINISHED_AGE = 3600.0
"""Seconds after which nobody writes to a file any more: its process was killed."""
_SCAN_SHARE = 32
"""Another process's files are counted again after this part of the limit was written."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe of a file's name must not block its reader.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStoreStats:
    """What a store did since it was opened."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    """Contents of hits."""
    bytes_written: int = 0
    damaged: int = 0
    """Misses whose file was there, and was not right."""
    dropped: int = 0
    """Contents that were not written: the queue or the disk was full, or they are too large."""


class _Pending(NamedTuple):
    key: bytes
    parts: list[memoryview]
    num_bytes: int
    """Of the parts."""
    size: int
    """Of the file."""


class _DamagedError(Exception):
    """A file of ours that is not right."""


class DiskStore:
    """Keeps contents by keys, at most `max_bytes` of files, the least recently used go first.

    Thread-safe. Reading takes no lock. One thread writes; where the disk is full or read-only it
    says so once, and from then on the store only reads. With several processes the directory may
    exceed its limit by 1/32 for each.
    """

    def __init__(self, directory: Path, max_bytes: int, namespace: bytes) -> None:
        """Open a directory, or make one that only this user can open.

        Args:
            directory: Shared by all stores on it, of whatever namespace.
            max_bytes: Of all files in it.
            namespace: Whatever a content depends on beside its key; others' files are misses.

        Raises:
            ConfigError: It is no directory, or not this user's, or others may write to it.
        """
        self.directory = directory
        self.max_bytes = max_bytes
        self._fd = _open_private(directory)
        self._namespace = blake3(namespace).digest()
        self._stats = DiskStoreStats()
        self._stats_lock = threading.Lock()
        self._reported: set[str] = set()
        """Files that are not right and cannot be removed."""
        self._pending: deque[_Pending] = deque()
        self._num_pending_bytes = 0
        self._changed = threading.Condition()
        self._is_writing = False
        self._is_closed = False
        self._is_read_only = False
        self._num_bytes = 0
        """Of all files at the last count, and of those written since."""
        self._num_unscanned = max_bytes
        """Bytes written since the last count; the first write counts."""
        self._writer = threading.Thread(target=self._write_pending, name="disk-store", daemon=True)
        self._writer.start()

    @property
    def stats(self) -> DiskStoreStats:
        return self._stats

    # ---- reading -------------------------------------------------------------------------------

    def get(self, key: bytes, memory: memoryview | None = None) -> memoryview | None:
        """Return what was put, read-only; None if it is not there, or is not right.

        `memory`: bytes into which it is read, which are as long as it; None: it gets memory of its
        own, which begins at a multiple of 16 bytes.
        """
        name = self._name(key)
        try:
            content = self._check(key, *self._read(name, _header_size(key), memory))
        except FileNotFoundError:
            self._count(misses=1)
            return None
        except (OSError, _DamagedError) as error:
            self._count(misses=1, damaged=1)
            self._discard(name, error)
            return None
        self._count(hits=1, bytes_read=len(content))
        return content

    def _read(
        self, name: str, header_size: int, memory: memoryview | None
    ) -> tuple[bytearray, memoryview]:
        """Return a file's header and what is behind it, and mark it as used."""
        fd = os.open(name, _READ, dir_fd=self._fd)
        try:
            status = os.fstat(fd)
            if not _is_own_file(status):
                raise PermissionError(f"it is no file of user {os.geteuid()}")
            num_bytes = status.st_size - header_size
            is_as_long = num_bytes >= 0 if memory is None else num_bytes == len(memory)
            if status.st_size > self.max_bytes or not is_as_long:
                raise _DamagedError(f"it has {status.st_size} bytes")
            header = bytearray(header_size)
            content = np.empty(num_bytes, np.uint8).data if memory is None else memory
            done = 0
            while done < status.st_size:
                views = [memoryview(header)[done:], content[max(0, done - header_size) :]]
                if not (number := os.readv(fd, views)):
                    raise _DamagedError(f"it ends after {done} bytes")
                done += number
            # The directory may be read-only.
            with suppress(OSError):
                os.utime(fd)
            return header, content.toreadonly()
        finally:
            os.close(fd)

    def _check(self, key: bytes, header: bytearray, content: memoryview) -> memoryview:
        """Return the content of a file, each byte of which must be right."""
        if header != self._header(key, len(content), [content]):
            raise _DamagedError("it is not what was written")
        return content

    def _discard(self, name: str, error: Exception) -> None:
        """Log once that a file is not right, and remove it if it is ours."""
        if name in self._reported:
            return
        logger.warning(
            "`%s` counts as a miss, since it is damaged, truncated or foreign: %s",
            *(self.directory / name, error),
        )
        try:
            if not isinstance(error, _DamagedError):
                raise error
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            pass
        except OSError:
            self._reported.add(name)

    # ---- writing -------------------------------------------------------------------------------

    def put(self, key: bytes, parts: Sequence[Part]) -> None:
        """Have the writer write the `parts`, one behind the other, unless they are there already.

        Returns at once. The parts are C-contiguous, and must not change. Nothing is written while
        too much waits.
        """
        views = [one.cast("B") for one in map(memoryview, parts) if one.nbytes]
        num_bytes = sum(len(view) for view in views)
        size = _header_size(key) + num_bytes
        with self._changed:
            is_full = self._pending and self._num_pending_bytes + size > MAX_PENDING_BYTES
            if self._is_closed or self._is_read_only or is_full or size > self.max_bytes:
                self._count(dropped=1)
                return
            self._pending.append(_Pending(key, views, num_bytes, size))
            self._num_pending_bytes += size
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending and not self._is_writing)

    def close(self) -> None:
        """Write what waits, and end the writer. Idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._writer.join()

    def __del__(self) -> None:
        # Not in `close`: another thread may read meanwhile.
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def _write_pending(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closed)
                if not self._pending:
                    return
                pending = self._pending.popleft()
                self._is_writing = True
            try:
                self._write(pending)
            finally:
                with self._changed:
                    self._num_pending_bytes -= pending.size
                    self._is_writing = False
                    self._changed.notify_all()

    def _write(self, pending: _Pending) -> None:
        key, parts, num_bytes, size = pending
        if self._is_read_only:
            self._count(dropped=1)
            return
        try:
            name = self._name(key)
            if self._is_there(name, size):
                return
            self._make_room(size)
            self._write_file(name, [self._header(key, num_bytes, parts), *parts])
        except OSError as error:
            self._is_read_only = True
            self._count(dropped=1)
            logger.warning(
                "`%s` cannot be written: %s; from now on it is only read",
                *(self.directory, error.strerror or error),
            )
        except Exception:
            # The thread goes on: `flush` and `close` wait for it.
            self._count(dropped=1)
            logger.exception("a content for `%s` was not written", self.directory)
        else:
            self._num_bytes += size
            self._num_unscanned += size
            self._count(bytes_written=num_bytes)

    def _is_there(self, name: str, size: int) -> bool:
        """Return whether a file of this size is there, and mark it as used."""
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not _is_own_file(status) or status.st_size != size:
            return False
        with suppress(FileNotFoundError):
            os.utime(name, dir_fd=self._fd, follow_symlinks=False)
        return True

    def _write_file(self, name: str, parts: Sequence[Part]) -> None:
        unfinished = f"{secrets.token_hex(16)}.mmjax-new"
        fd = os.open(unfinished, _CREATE, 0o600, dir_fd=self._fd)
        try:
            try:
                for part in parts:
                    view = memoryview(part)
                    while view:
                        view = view[os.write(fd, view) :]
            finally:
                os.close(fd)
            os.rename(unfinished, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=self._fd)
            raise

    def _make_room(self, size: int) -> None:
        """Remove the files that were not used for the longest time, until `size` bytes fit."""
        is_full = self._num_bytes + size > self.max_bytes
        if not is_full and self._num_unscanned < self.max_bytes // _SCAN_SHARE:
            return
        files, self._num_bytes = self._scan()
        self._num_unscanned = 0
        if self._num_bytes + size <= self.max_bytes:
            return
        # More than is needed, so that not every write counts all files.
        wanted = max(0, self.max_bytes - size - self.max_bytes // _SCAN_SHARE)
        for name in sorted(files, key=lambda one: files[one].st_mtime_ns):
            if self._num_bytes <= wanted:
                break
            # Another process may have removed it.
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd)
            self._num_bytes -= files[name].st_size

    def _scan(self) -> tuple[dict[str, os.stat_result], int]:
        """Return our files, and the bytes of all; remove what killed processes did not finish.

        What another process writes now counts, and is not to be removed.
        """
        files: dict[str, os.stat_result] = {}
        num_bytes = 0
        oldest = time.time() - _UNFINISHED_AGE
        with os.scandir(self._fd) as entries:
            for entry in entries:
                is_unfinished = _UNFINISHED_NAME.fullmatch(entry.name) is not None
                if not is_unfinished and not _NAME.fullmatch(entry.name):
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not _is_own_file(status):
                        continue
                    if is_unfinished and status.st_mtime < oldest:
                        os.unlink(entry.name, dir_fd=self._fd)
                        continue
                    num_bytes += status.st_size
                    if not is_unfinished:
                        files[entry.name] = status
        return files, num_bytes

    # ---- the form of a file --------------------------------------------------------------------

    def _name(self, key: bytes) -> str:
        return f"{blake3(self._namespace + key).hexdigest()}.mmjax"

    def _header(self, key: bytes, num_bytes: int, parts: Sequence[Part]) -> bytes:
        hasher = blake3()
        for part in parts:
            hasher.update(part)
        head = _HEAD.pack(
            *(_MAGIC, FORMAT_VERSION, len(key), num_bytes, self._namespace, hasher.digest())
        )
        return (head + key).ljust(_header_size(key), b"\0")

    def _count(self, **more: int) -> None:
        with self._stats_lock:
            self._stats = replace(
                self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()}
            )


def _header_size(key: bytes) -> int:
    return round_up(_HEAD.size + len(key), ALIGNMENT)


def _is_own_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def check_directory(directory: Path) -> None:
    """Raise ConfigError unless a directory can be a cache's; it is made where there is none."""
    os.close(_open_private(directory))


def _open_private(directory: Path) -> int:
    """Return a descriptor of a directory to which nobody else may write."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory, _OPEN_DIRECTORY)
    except OSError as error:
        raise ConfigError(
            f"`{directory}` cannot be a cache's directory: {error.strerror}; name a directory of "
            "this user, or one that can be made, and no link to one"
        ) from error
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o022:
        os.close(fd)
        raise ConfigError(
            f"`{directory}` belongs to user {status.st_uid} with mode {mode:o}; a cache's "
            f"directory must belong to {os.geteuid()}, and nobody else may write to it: change "
            "its mode, or name another"
        )
    return fd
