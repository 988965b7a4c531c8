"""What is not used any more is returned to the system: freed memory, and pages of files.

Without effect on other systems than Linux with glibc.
"""

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_MMAP_THRESHOLD_BYTES = 2**20
_MADV_DONTNEED = 4  # mman.h of Linux


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


def return_pages_of_files(folder: Path) -> None:
    """Unload what this process has read of the mapped files in `folder`.

    They count as its memory until they are unmapped. What is read again comes from the system's
    cache of files, or from the disk. Of files that are mapped to be read alone.
    """
    libc = _glibc()
    if libc is None:
        return
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        addresses, access, *_, path = line.split(maxsplit=5)
        if "w" in access or Path(path).parent != folder:
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


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
