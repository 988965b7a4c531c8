"""When a request's images are decoded: how much at once, on whose turn, and until when.

Knows neither images nor requests: sizes are numbers of decoded bytes.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mmjax.errors import RequestCancelledError
from mmjax.system.request_times import measuring

MAX_BATCH_BYTES = 64 * 2**20
"""Images are decoded, and given to HF's processor, so much at a time; a larger one alone."""

_LOOK_S = 0.05
"""How often who waits for a turn looks whether the request is still wanted."""

T = TypeVar("T")


class Cancellation:
    """Whether a request is still wanted; set in one thread, obeyed in another."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        """Say that nobody wants the request any more."""
        self.is_set = True

    def check(self) -> None:
        """Raise RequestCancelledError if nobody wants the request any more."""
        if self.is_set:
            raise RequestCancelledError


class DecodeBudget:
    """Decoded bytes that may be there at once, over all requests; many threads share it.

    Who asks for more than there is waits for its turn: first come, first served.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """In use."""
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def try_take(self, num_bytes: int, share: float = 1.0) -> bool:
        """Take bytes if nobody waits, and no more than `share` of all are then in use."""
        with self._changed:
            if self._waiting or self.num_bytes + num_bytes > self.max_bytes * share:
                return False
            self.num_bytes += num_bytes
            return True

    def give_back(self, num_bytes: int) -> None:
        """Let others have what was taken."""
        with self._changed:
            self.num_bytes -= num_bytes
            self._changed.notify_all()

    @contextmanager
    def hold(
        self,
        num_bytes: int,
        cancellation: Cancellation,
        *,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Wait for `num_bytes` (for all there is, where it is less), and give them back at the end.

        RequestCancelledError as soon as the request is cancelled. `on_wait` is called before a
        wait: it must give back what the request has taken already, or two wait for each other.
        """
        if num_bytes == 0:  # nothing to decode: no turn to wait for
            yield
            return
        taken = min(num_bytes, self.max_bytes)
        with measuring("queue"):
            cancellation.check()
            if not self.try_take(taken):
                on_wait()
                self._take(taken, cancellation)
        try:
            yield
        finally:
            self.give_back(taken)

    def _take(self, num_bytes: int, cancellation: Cancellation) -> None:
        turn = object()
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._waiting[0] is not turn or self.num_bytes + num_bytes > self.max_bytes:
                    self._changed.wait(_LOOK_S)
                    cancellation.check()
                self.num_bytes += num_bytes
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()


def split_by_bytes(
    sizes: Iterable[tuple[T, int]], max_bytes: int = MAX_BATCH_BYTES
) -> list[tuple[list[T], int]]:
    """Divide in order into batches of at most `max_bytes`, with each batch's bytes.

    What is larger is a batch alone: `[(a, 3), (b, 4), (c, 9), (d, 1)], 8` -> `ab, c, d`.
    """
    batches: list[tuple[list[T], int]] = []
    for item, size in sizes:
        if batches and batches[-1][1] + size <= max_bytes:
            members, total = batches[-1]
            members.append(item)
            batches[-1] = (members, total + size)
        else:
            batches.append(([item], size))
    return batches
