"""Deadlines of requests, in `time.monotonic()` seconds."""

import heapq
import math


class Deadlines:
    """A heap of deadlines; those of finished requests are dropped when they expire."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._of: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, request_id: str, deadline: float | None) -> None:
        """Set a request's deadline, replacing one of an earlier request of that id."""
        if deadline is None or math.isnan(deadline):
            self._of.pop(request_id, None)
            return
        self._of[request_id] = deadline
        heapq.heappush(self._heap, (deadline, request_id))

    def pop_expired(self, now: float) -> list[str]:
        """Remove and return the requests whose deadline is at or before `now`, earliest first."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._heap)
            if self._of.get(request_id) == deadline:
                del self._of[request_id]
                expired.append(request_id)
        return expired
