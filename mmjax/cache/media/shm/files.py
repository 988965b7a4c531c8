"""Shared-memory files: their directory, permissions, and the removal of stale ones.

A writer holds a lock on its file as long as it lives. Unlike a process id, the lock is valid also
between containers that share the memory.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mmjax.errors import ConfigError
from mmjax.logger import get_logger

logger = get_logger(__name__)

_SUFFIX = ".ring"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class NoSharedMemoryError(ConfigError):
    """There is no room for a segment."""


def new_segment_name() -> str:
    """Return a unique name."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove files whose writer has exited, and return their paths."""
    removed = []
    for path in directory.glob(f"*{_SUFFIX}"):
        with suppress(OSError), _locked(path, os.O_RDWR, is_waiting=False):
            path.unlink()
            removed.append(path)
    if removed:
        logger.info("removed %d files of shared memory that dead processes left", len(removed))
    return removed


def remove_dead_segments() -> None:
    """Remove what dead processes left in all directories that segments are made in."""
    for directory in _candidate_directories():
        # Another user's directory, or none.
        with suppress(OSError, ConfigError):
            _check_private(directory, directory.lstat())
            with _locked(directory, os.O_RDONLY, is_waiting=True):
                remove_leftovers(directory)


@contextmanager
def _locked(path: Path, flags: int, *, is_waiting: bool) -> Iterator[None]:
    """Lock a file or directory; OSError if it is locked already and not `is_waiting`."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if is_waiting else fcntl.LOCK_NB))
        yield
    finally:
        os.close(fd)


def create_file(
    name: str, size: int, directory: Path | None = None, *, num_reserved: int = 0
) -> tuple[Path, int]:
    """Create a sparse, locked file that only this user can open; return it and its descriptor.

    Also removes stale files of the directory.

    Args:
        name: Without its suffix.
        size: In bytes.
        directory: None: a private one in shared memory.
        num_reserved: Bytes from its beginning that get memory now: else a store there would raise
            SIGBUS once there is none.

    Raises:
        NoSharedMemoryError: There is no room for it.
        ConfigError: It cannot be made for another reason.
    """
    directory = _find_directory() if directory is None else directory
    _check_private(directory, directory.lstat())
    path = directory / _file_name(name)
    try:
        # Else another process could remove the new file as stale before it is locked.
        with _locked(directory, os.O_RDONLY, is_waiting=True):
            remove_leftovers(directory)
            return path, _create_locked(path, size, num_reserved)
    except OSError as error:
        error_class = NoSharedMemoryError if error.errno in _NO_ROOM else ConfigError
        raise error_class(
            f"the processor cache's shared memory `{path}` cannot be made: {error.strerror}; "
            "choose another `mm_shm_name`, or `--mm-processor-cache-type lru`"
        ) from error


def open_file(name: str, directory: Path | None = None) -> tuple[Path, int]:
    """Open a file that another process created; return it and its descriptor."""
    directories = _candidate_directories() if directory is None else [directory]
    paths = [one / _file_name(name) for one in directories]
    path = next((one for one in paths if one.exists()), None)
    if path is None:
        raise ConfigError(
            f"the processor cache's shared memory `{name}` is not there; P0 makes it before it "
            "starts P1, and P1 gets its name as `mm_shm_name`"
        )
    _check_private(path.parent, path.parent.lstat())
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"the processor cache's shared memory `{path}` cannot be read: {error.strerror}; P1 "
            "must run as the user that P0 runs as"
        ) from error
    try:
        _check_private(path, os.fstat(fd))
    except ConfigError:
        os.close(fd)
        raise
    return path, fd


def remove_file(path: Path, fd: int, pid: int) -> None:
    """Close a descriptor; unlink its file if this is process `pid`, which created it."""
    # A forked child runs its parent's finalizers, and must not remove the parent's file.
    if pid == os.getpid():
        with suppress(OSError):
            path.unlink()
    os.close(fd)


def _create_locked(path: Path, size: int, num_reserved: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        if num_reserved and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_reserved)
    except BaseException:
        remove_file(path, fd, os.getpid())
        raise
    return fd


def _file_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"`mm_shm_name` is {name!r}; give up to 128 letters, digits, `.`, `_` and `-`"
        )
    return name + _SUFFIX


def _candidate_directories() -> list[Path]:
    roots = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return [root / f"mmjax-{os.geteuid()}" for root in roots]


def _find_directory() -> Path:
    """Return the first directory that only this user can access, creating it if needed."""
    reasons = []
    for directory in _candidate_directories():
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            _check_private(directory, directory.lstat())
            return directory
        except (OSError, ConfigError) as error:
            reasons.append(str(error))
    raise ConfigError(f"no directory for shared memory: {'; '.join(reasons)}")


def _check_private(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    is_plain = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    if not is_plain or status.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(
            f"`{path}` belongs to user {status.st_uid} with mode {mode:o}; it must be plain, and "
            f"belong to {os.geteuid()} alone: remove it, or change its mode"
        )
