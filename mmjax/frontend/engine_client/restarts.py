"""When P1 is started again: a circuit breaker over its ends.

Knows nothing of processes.
"""

import time
from collections.abc import Callable

MAX_FRUITLESS_STARTS = 8
"""Ends in a row, without progress in between, after which the next start waits."""
PROGRESS_S = 10.0
"""A P1 that was ready for so long has made progress, also without requests."""
FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0


class RestartBreaker:
    """Counts ends of P1 without progress; says how long to wait before the next start.

    After each pause one start is tried: if it makes no progress, either, the next pause is twice
    as long; if it does, all is as in the beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_fruitless = 0
        self._ready_at: float | None = None

    def note_ready(self) -> None:
        """Take note that P1 is ready."""
        self._ready_at = self._clock()

    def note_progress(self) -> None:
        """Take note that P1 has generated tokens."""
        self._num_fruitless = 0

    def note_exit(self) -> float:
        """Take note of P1's end; return the seconds until it may be started again, mostly 0."""
        if self._ready_at is not None and self._clock() - self._ready_at >= PROGRESS_S:
            self._num_fruitless = 0
        self._ready_at = None
        self._num_fruitless += 1
        excess = self._num_fruitless - MAX_FRUITLESS_STARTS
        return 0.0 if excess < 0 else min(FIRST_PAUSE_S * 2.0**excess, MAX_PAUSE_S)
