"""JAX's persistent compilation cache: where it is, and how its files are written and checked.

JAX writes an entry in place, never writes it again, and may run a damaged one: what it stores is
machine code. Here an entry is renamed when it is whole, and checked before it is used, by an empty
file whose name has its digest. The entries themselves are as JAX has them, so that other programs
may share the directory.
"""

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from blake3 import blake3
from jax._src import compilation_cache, compiler

from mmjax.system.logger import get_logger

logger = get_logger(__name__)

_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_ENTRY, _DIGEST, _UNFINISHED = "-cache", "-blake3", "-new"


def default_cache_dir() -> Path:
    """Return this user's directory for the persistent compilation cache."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative one does not count, by the XDG specification.
    caches = given if given.is_absolute() else Path.home() / ".cache"
    return caches / "mmjax" / "xla"


def enable_persistent_cache(directory: Path | None) -> None:
    """Set JAX's persistent compilation cache, unless `JAX_COMPILATION_CACHE_DIR` sets one.

    A process that can write to the directory can run code here, so one that other users may write
    to is refused with a warning.
    """
    _check_entries()
    if directory is None:
        if jax.config.values.get("jax_compilation_cache_dir") is not None:
            return
        directory = default_cache_dir()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        logger.warning("no persistent compile cache: %s", error)
        return
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        logger.warning(
            "no persistent compile cache: %s belongs to user %d with mode %o; it must be yours, "
            "and nobody else may write it",
            directory,
            status.st_uid,
            status.st_mode & 0o777,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update(_MIN_SECONDS, 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _check_entries() -> None:
    """Let JAX keep its entries in `CheckedCache`, from its first compilation on."""
    # NOTE: JAX has no public way to give it a cache; without this function it uses its own.
    caches: Any = compilation_cache
    if hasattr(caches, "get_file_cache"):
        caches.get_file_cache = _make_cache
    # As JAX has it, process 0 alone writes, for all: but the directory may be of one host, and on a
    # CPU each process has keys of its own. So the others would compile all at every start.
    writer: Any = compiler
    if hasattr(writer, "_cache_write"):
        writer._cache_write = _write_entry


def _write_entry(
    cache_key: str,
    compile_time_secs: float,
    module_name: str,
    backend: Any,
    executable: Any,
    *host_callbacks: Any,
) -> None:
    """Write what this process has compiled, whichever it is of several."""
    # Callbacks are addresses of this process: until JAX 0.10 a list, later it leaves them out.
    if compile_time_secs < jax.config.values[_MIN_SECONDS] or any(host_callbacks):
        return
    try:
        compilation_cache.put_executable_and_time(
            cache_key, module_name, executable, backend, int(compile_time_secs)
        )
    except jax.errors.JaxRuntimeError as error:
        logger.warning("`%s` cannot be kept in the compile cache: %s", module_name, error)


def _make_cache(path: str) -> "tuple[CheckedCache, str]":
    return CheckedCache(Path(path)), path


class CheckedCache:
    """JAX's `CacheInterface` over a directory. It raises nothing: a program is compiled instead."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_written = True
        """Whether entries are written: no more, once one could not be."""
        self._has_noted_unreadable = False
        with suppress(OSError):
            # One that is missing is found out at the first entry.
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        """Return an entry; None if there is none, or if it is not what was written."""
        entry = self._path / f"{key}{_ENTRY}"
        try:
            data = entry.read_bytes()
            if data and self._is_whole(key, data):
                return data
        except FileNotFoundError:
            return None
        except OSError as error:
            if not self._has_noted_unreadable:
                self._has_noted_unreadable = True
                logger.warning("the compile cache in %s cannot be read: %s", self._path, error)
            return None
        logger.warning("an entry of the compile cache was damaged, and is made again: %s", entry)
        with suppress(OSError):
            entry.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Write an entry, in place of one that JAX could not use."""
        if not self._is_written:
            return
        try:
            # Before the entry: one without any digest is taken as it is. One of another process,
            # which writes the same entry now, stays.
            (self._path / _digest_name(key, value)).touch()
            self._write(self._path / f"{key}{_ENTRY}", value)
        except OSError as error:
            self._is_written = False
            reason = "it is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            logger.warning(
                "the compile cache in %s is not written any more (%s); the next start compiles "
                "again what is not in it",
                *(self._path, reason),
            )

    def _is_whole(self, key: str, data: bytes) -> bool:
        if (self._path / _digest_name(key, data)).exists():
            return True
        # Another program writes no digests; JAX checks its entries as far as it can.
        return not any(self._path.glob(f"{key}-*{_DIGEST}"))

    def _write(self, path: Path, data: bytes) -> None:
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_UNFINISHED}")
        try:
            unfinished.write_bytes(data)
            unfinished.replace(path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise


def _digest_name(key: str, data: bytes) -> str:
    return f"{key}-{blake3(data).hexdigest(16)}{_DIGEST}"
