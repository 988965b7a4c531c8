"""Whose turn it is: a thread serves step by step, and one that changes the weights gets the next.

A lock alone is not fair: the thread that has just released it is the first to take it again.
"""

import threading


class Turn:
    """A context that one thread at a time is in; nobody passes whoever waits for it."""

    def __init__(self) -> None:
        self._queue, self._lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._queue:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class OneCall:
    """Lets one call at a time be answered: another would take its answers, and both wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin a call; RuntimeError where one has not ended."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this LLM answers another call, whose answers are not all read; read them to their "
                "end, or close their iterator, and ask then"
            )

    def end(self) -> None:
        """End the call; any thread may."""
        self._lock.release()
