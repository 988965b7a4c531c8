"""Orders of requests: in which those that wait start, and in which deadlines pass."""

import heapq
import math
from bisect import insort
from collections.abc import Iterator

from mmjax.engine.scheduling.request import Request


class WaitingQueue:
    """Requests that do not run, by priority, then by arrival; a preemption keeps both."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []
        self._arrivals: dict[str, int] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._entries)

    def add(self, request: Request) -> None:
        """Insert a request; a preempted one keeps its arrival."""
        arrival = self._arrivals.get(request.request_id)
        if arrival is None:
            arrival = self._arrivals[request.request_id] = self._num_arrived
            self._num_arrived += 1
        insort(self._entries, (request.priority, arrival, request), key=lambda entry: entry[:2])

    def key(self, request: Request) -> tuple[int, int]:
        """Return (priority, arrival)."""
        return request.priority, self._arrivals[request.request_id]

    def remove(self, request: Request) -> None:
        """Remove a waiting request."""
        self._entries = [entry for entry in self._entries if entry[2] is not request]

    def forget(self, request: Request) -> None:
        """Drop the arrival of a finished request."""
        self._arrivals.pop(request.request_id, None)


class Deadlines:
    """Deadlines in `time.monotonic()` seconds; those of finished requests go as they pass."""

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
