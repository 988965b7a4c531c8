"""Compiled programs: where they are kept between runs, and whether serving made any."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from mmjax.logger import get_logger

logger = get_logger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def default_cache_dir() -> Path:
    """Return the persistent compile cache of this user."""
    return Path.home() / ".cache" / "mmjax" / "xla"


def enable_persistent_cache(directory: Path | None) -> None:
    """Keep compiled programs in `directory` from now on, in a folder that only this user may use.

    A cache that the caller has set up already (`JAX_COMPILATION_CACHE_DIR`) stays. Whoever can
    write there can run code here, so a folder that others may write is refused with a warning.
    """
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
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompilationCounter:
    """Counts the programs that are compiled (or fetched from the cache) while it watches.

    Only its own thread counts: the process may hold other engines, and other users of JAX.
    """

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what this thread compiles inside the block."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if event == _COMPILE_EVENT and self._thread == threading.get_ident():
            self.count += 1
