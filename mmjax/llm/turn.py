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
