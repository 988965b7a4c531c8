"""Settings of glibc's malloc, so that freed memory is returned to the system.

Without effect on other C libraries.
"""

import ctypes
import sys
from functools import cache
from typing import Any

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_MMAP_THRESHOLD_BYTES = 2**20


def return_large_blocks() -> bool:
    """Have malloc use mmap for blocks of 1 MiB and more, which are then unmapped when freed.

    By default glibc raises that threshold, up to 32 MiB, whenever such a block is freed; bitmaps
    are then in its heaps, which it keeps: gigabytes after a few large images. Setting the threshold
    fixes it. Returns whether it is set: False for other C libraries.
    """
    libc = _glibc()
    return libc is not None and bool(libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES))


def return_free_pages() -> None:
    """Return free pages of all threads' heaps to the system; takes milliseconds.

    By itself glibc only trims the end of a heap.
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
        libc.gnu_get_libc_version  # noqa: B018  # other C libraries have these calls with another meaning
    except (AttributeError, OSError):
        return None
    return libc
