"""Prefault pages of shared memory: page faults take most of the time of a first copy."""

import threading

import numpy as np

from mmjax.cache.media.shm.segment import PAGE, Segment

AHEAD = 64 * 2**20
"""Bytes after the newest object that are prefaulted."""
_CHUNK = 2**21


class PageWarmer:
    """Prefaults pages in a thread, `AHEAD` of the writer, during its first round.

    Copying 64 MB on a virtual machine took 90 to 190 ms over untouched pages, 10 ms over others.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._num_warm = 0
        self._target = 0
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def stay_ahead_of(self, address: int) -> None:
        """Prefault pages after `address` in the thread; returns at once. Not thread-safe."""
        target = min(address + AHEAD, self._segment.capacity)
        is_running = self._thread is not None and self._thread.is_alive()
        if target <= self._num_warm or is_running or self._is_over.is_set():
            return
        # Twice as far, so that not every object starts a thread.
        self._target = min(target + AHEAD, self._segment.capacity)
        self._thread = threading.Thread(target=self._warm, name="mmjax-shm-warmer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for the thread, which uses the segment. Idempotent."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _warm(self) -> None:
        while self._num_warm < self._target and not self._is_over.is_set():
            stop = min(self._num_warm + _CHUNK, self._target)
            try:
                self._segment.back_with_memory(self._num_warm, stop - self._num_warm)
            except OSError:
                # The writer meets the same limit, and logs it.
                self._is_over.set()
                return
            # A load maps a page as a store does, without a race. `max` releases the GIL.
            np.frombuffer(self._segment.data[self._num_warm : stop], np.uint8)[::PAGE].max()
            self._num_warm = stop
