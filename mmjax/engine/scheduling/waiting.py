"""The queue of requests that do not run: by priority, then by arrival."""

from bisect import insort
from collections.abc import Iterator

from mmjax.engine.scheduling.request import Request


class WaitingQueue:
    """Keeps arrival order through preemption: who came first goes first again."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []
        self._arrivals: dict[str, int] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._entries)

    def add(self, request: Request) -> None:
        """Insert a request; one that was here before keeps its place in the order."""
        arrival = self._arrivals.get(request.request_id)
        if arrival is None:
            arrival = self._arrivals[request.request_id] = self._num_arrived
            self._num_arrived += 1
        insort(self._entries, (request.priority, arrival, request), key=lambda entry: entry[:2])

    def key(self, request: Request) -> tuple[int, int]:
        """Return what a request is ordered by."""
        return request.priority, self._arrivals[request.request_id]

    def peek(self) -> Request:
        """Return the first request, and leave it."""
        return self._entries[0][2]

    def pop(self) -> Request:
        """Take the first request."""
        return self._entries.pop(0)[2]

    def remove(self, request: Request) -> None:
        """Take out a request that waits."""
        self._entries = [entry for entry in self._entries if entry[2] is not request]

    def forget(self, request: Request) -> None:
        """Drop the arrival of a request that is finished."""
        self._arrivals.pop(request.request_id, None)
