"""The directory of one server's items in shared memory: one file an item, which P1 maps.

P0 unlinks the file of an item that it evicts. Who has it mapped reads on: the kernel frees the
memory with the last mapping, also where a process was killed.

A writer holds a lock on its directory as long as it lives. Unlike a process id, the lock is valid
also between containers that share the memory.
"""

import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from mmjax.errors import ConfigError
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NoSharedMemoryError(ConfigError):
    """There is no room for a directory of items."""


class SharedDirectory:
    """P0's (`create`) or P1's (`open`). Items are known by numbers, which are used once."""

    def __init__(self, path: Path, fd: int, *, is_writer: bool) -> None:
        self.path = path
        self._fd = fd
        self._close = weakref.finalize(self, _close, path, fd, os.getpid() if is_writer else None)

    @classmethod
    def create(cls, name: str | None = None, root: Path | None = None) -> "SharedDirectory":
        """Make and lock a directory that only this user can open; remove those of dead writers.

        Args:
            name: None: a unique one.
            root: Where it is made; None: a private directory in shared memory.

        Raises:
            NoSharedMemoryError: There is no room for it.
            ConfigError: It cannot be made for another reason.
        """
        root = _find_root() if root is None else root
        _check_private(root, root.lstat())
        if name is None:
            name = f"{os.getpid()}-{secrets.token_hex(8)}"
        path = root / _check_name(name)
        try:
            # Else another process could remove the new directory before it is locked.
            with _locked(root, is_waiting=True):
                _remove_dead(root)
                path.mkdir(mode=0o700)
                fd = os.open(path, _OPEN_DIRECTORY)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                directory = cls(path, fd, is_writer=True)
            directory._probe()
        except OSError as error:
            error_class = NoSharedMemoryError if error.errno in _NO_ROOM else ConfigError
            raise error_class(
                f"the processor cache's shared memory `{path}` cannot be made: {error.strerror}; "
                "choose another `mm_shm_name`, or `--mm-processor-cache-type lru`"
            ) from error
        return directory

    @classmethod
    def open(cls, name: str, root: Path | None = None) -> "SharedDirectory":
        """Open the directory that P0 made."""
        roots = _candidate_roots() if root is None else [root]
        paths = [one / _check_name(name) for one in roots]
        path = next((one for one in paths if one.exists()), None)
        if path is None:
            raise ConfigError(
                f"the processor cache's shared memory `{name}` is not there; P0 makes it before "
                "it starts P1, and P1 gets its name as `mm_shm_name`"
            )
        for one in (path.parent, path):
            _check_private(one, one.lstat())
        try:
            return cls(path, os.open(path, _OPEN_DIRECTORY), is_writer=False)
        except OSError as error:
            raise ConfigError(
                f"the processor cache's shared memory `{path}` cannot be read: {error.strerror}; "
                "P1 must run as the user that P0 runs as"
            ) from error

    def write(self, number: int, size: int, arrays: Sequence[tuple[int, np.ndarray]]) -> None:
        """Write an item of `size` bytes, each array at its offset; OSError without room."""
        name = str(number)
        fd = os.open(name, _CREATE, 0o600, dir_fd=self._fd)
        try:
            os.ftruncate(fd, size)
            for offset, array in arrays:
                data = array.reshape(-1).view(np.uint8).data
                while data:
                    num_written = os.pwrite(fd, data, offset)
                    offset, data = offset + num_written, data[num_written:]
        except BaseException:
            os.unlink(name, dir_fd=self._fd)
            raise
        finally:
            os.close(fd)

    def read(self, number: int) -> np.ndarray | None:
        """Return an item's bytes, read-only uint8[size]; None if P0 has evicted it."""
        try:
            fd = os.open(str(number), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        try:
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            return np.frombuffer(mmap.mmap(fd, 0, flags, mmap.PROT_READ), np.uint8)
        finally:
            os.close(fd)

    def remove(self, number: int) -> None:
        """Unlink an item's file; idempotent."""
        with suppress(FileNotFoundError):
            os.unlink(str(number), dir_fd=self._fd)

    @property
    def is_closed(self) -> bool:
        return not self._close.alive

    def close(self) -> None:
        """Close it; P0 also removes it, with all items. Views stay readable. Idempotent."""
        self._close()

    def _probe(self) -> None:
        """Raise OSError unless there is room for a page."""
        try:
            self.write(0, mmap.PAGESIZE, [(0, np.zeros(mmap.PAGESIZE, np.uint8))])
        except OSError:
            self.close()
            raise
        self.remove(0)


def remove_dead_directories() -> None:
    """Remove what dead processes left in all roots."""
    for root in _candidate_roots():
        # Another user's, or none.
        with suppress(OSError, ConfigError):
            _check_private(root, root.lstat())
            with _locked(root, is_waiting=True):
                _remove_dead(root)


def _remove_dead(root: Path) -> None:
    """Remove directories whose writer has ended; call it with the root's lock."""
    num_removed = 0
    for path in root.iterdir():
        with suppress(OSError), _locked(path, is_waiting=False):
            shutil.rmtree(path)
            num_removed += 1
    if num_removed:
        logger.info("removed %d directories of shared memory of dead processes", num_removed)


@contextmanager
def _locked(path: Path, *, is_waiting: bool) -> Iterator[None]:
    """Lock a directory; OSError if it is locked already and not `is_waiting`."""
    fd = os.open(path, _OPEN_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if is_waiting else fcntl.LOCK_NB))
        yield
    finally:
        os.close(fd)


def _close(path: Path, fd: int, writer_pid: int | None) -> None:
    # A forked child runs its parent's finalizers, and must not remove the parent's items.
    if writer_pid == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
    os.close(fd)


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"`mm_shm_name` is {name!r}; give up to 128 letters, digits, `.`, `_` and `-`"
        )
    return name


def _candidate_roots() -> list[Path]:
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return [folder / f"mmjax-{os.geteuid()}" for folder in folders]


def _find_root() -> Path:
    """Return the first root that only this user can access, creating it if needed."""
    reasons = []
    for root in _candidate_roots():
        try:
            root.mkdir(mode=0o700, exist_ok=True)
            _check_private(root, root.lstat())
            return root
        except (OSError, ConfigError) as error:
            reasons.append(str(error))
    raise ConfigError(f"no directory for shared memory: {'; '.join(reasons)}")


def _check_private(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(
            f"`{path}` belongs to user {status.st_uid} with mode {mode:o}; it must be a directory, "
            f"and belong to {os.geteuid()} alone: remove it, or change its mode"
        )
