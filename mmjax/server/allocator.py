"""The C library's allocator, told to give large blocks back to the system."""

import ctypes
import sys

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_MMAP_THRESHOLD_BYTES = 2**20


def return_large_blocks() -> bool:
    """Have each block of 1 MiB and more mapped by itself, and unmapped when it is freed.

    glibc raises that threshold by itself, up to 32 MiB, whenever such a block is freed. From then
    on bitmaps lie in its heaps, which it keeps: gigabytes after a few large pictures. Setting it
    fixes it. Returns whether it is set: False where the C library is another.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # other libraries take the call, and another meaning
        return bool(libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES))
    except (AttributeError, OSError):
        return False
