"""What is not used is returned to the system: freed memory, pages of files, pages of zeros.

What will be written soon can be taken before, and what is read again and again may lie in large
pages. Without effect on other systems than Linux with
glibc.
"""

import ctypes
import mmap
import sys
from functools import cache
from pathlib import Path
from typing import Any

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_MMAP_THRESHOLD_BYTES = 2**20
_MADV_DONTNEED = 4  # mman.h of Linux
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # from Linux 5.14 on
_MADV_COLLAPSE = 25  # from Linux 6.1 on; older ones do it in the background
_LARGE_PAGE_BYTES = 2**21


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


def return_pages_of_zeros(address: int, num_bytes: int) -> None:
    """Return memory that holds zeros, but for parts of pages; the system gives it anew, zeroed.

    It counts as this process's again as it is written, page by page. Of memory that is this
    process's alone, and neither a file's nor shared.
    """
    libc = _glibc()
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if libc is not None and size > 0:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_DONTNEED)


def take_pages(address: int, num_bytes: int) -> None:
    """Have the system give memory that will be written; what is in it stays.

    Else it gives each page when it is first written, for which the processor waits: on a virtual
    machine 2 to 3 us for 4 KiB. Where the system refuses, nothing changes.
    """
    libc = _glibc()
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = -(-(address + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE - start
    if libc is not None and num_bytes > 0:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)


def use_large_pages(address: int, num_bytes: int) -> None:
    """Put memory that was written into pages of 2 MiB, as far as it fills them.

    A processor then reads it in order up to twice as fast: fewer addresses to look up, and it
    fetches ahead beyond 4 KiB. Takes about 2 s a gigabyte. Where the system refuses, nothing
    changes.
    """
    libc = _glibc()
    start = -(-address // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
    size = (address + num_bytes) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES - start
    if libc is None or size <= 0:
        return
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


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
