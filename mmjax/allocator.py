"""The C library's allocator, told to give back to the system what is freed.

Elsewhere than on Linux with glibc, nothing here has an effect.
"""

import ctypes
import sys
from functools import cache
from typing import Any

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_MMAP_THRESHOLD_BYTES = 2**20


def return_large_blocks() -> bool:
    """Have each block of 1 MiB and more mapped by itself, and unmapped when it is freed.

    glibc raises that threshold by itself, up to 32 MiB, whenever such a block is freed. From then
    on bitmaps lie in its heaps, which it keeps: gigabytes after a few large pictures. Setting it
    fixes it. Returns whether it is set: False where the C library is another.
    """
    libc = _glibc()
    return libc is not None and bool(libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES))


def return_free_pages() -> None:
    """Give the free pages of all heaps back: a thread has its own, and shrinks its end alone.

    Takes milliseconds: for the end of a large piece of work.
    """
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # others take the same calls, and mean another thing
    except (AttributeError, OSError):
        return None
    return libc
