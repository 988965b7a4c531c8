"""Threads get stacks of their own size, and the process's setting stays what it was."""

import ctypes
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmjax.system.threads import DeepStackPool

STACK_BYTES = 48 * 2**20


def find_stack_bytes() -> int:
    libc = ctypes.CDLL(None)
    attributes, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
    thread = ctypes.c_ulong(threading.get_ident())
    assert libc.pthread_getattr_np(thread, attributes) == 0
    assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
    libc.pthread_attr_destroy(attributes)
    return size.value


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc for a thread's stack")
def test_pools_started_at_once_leave_other_threads_their_stacks() -> None:
    def start_and_measure(_: int) -> list[int]:
        with DeepStackPool(4, stack_bytes=STACK_BYTES, thread_name_prefix="deep") as pool:
            return [future.result() for future in [pool.submit(find_stack_bytes)] * 4]

    before = threading.stack_size()
    with ThreadPoolExecutor(8) as starters:
        found = list(starters.map(start_and_measure, range(64)))
    # At least: glibc hands a new thread the larger stack of one that ended, which in a process of
    # many tests may be a compiling thread's. The setting is what later threads ask for.
    assert min(size for sizes in found for size in sizes) >= STACK_BYTES
    assert threading.stack_size() == before
