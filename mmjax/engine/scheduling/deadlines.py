"""When requests must be finished: the earliest first, on the clock of `time.monotonic`."""

import heapq
import math


class Deadlines:
    """A heap of deadlines; one of a request that is over is dropped when its time comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._of: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, request_id: str, deadline: float | None) -> None:
        """Note by when a request must be finished; what an earlier one of that id had is void."""
        if deadline is None or math.isnan(deadline):
            self._of.pop(request_id, None)
            return
        self._of[request_id] = deadline
        heapq.heappush(self._heap, (deadline, request_id))

    def pop_expired(self, now: float) -> list[str]:
        """Return the requests whose deadline is not after `now`, the earliest first."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._heap)
            if self._of.get(request_id) == deadline:
                del self._of[request_id]
                expired.append(request_id)
        return expired

    def clear(self) -> None:
        """Forget all: no request is left."""
        self._heap.clear()
        self._of.clear()
