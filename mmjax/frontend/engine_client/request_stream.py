"""A request as its reader sees it: while it is processed, and while it answers."""

import asyncio
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field

from mmjax.errors import (
    RequestCancelledError,
    RequestError,
)
from mmjax.frontend.engine_client.capacity import TokenReservation
from mmjax.frontend.engine_client.requests import ProcessedRequest
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.processing.media.decode_budget import Cancellation
from mmjax.requests.request_times import RequestTimes


class RequestStream:
    """An async iterator over the outputs of one request; `close` aborts it."""

    def __init__(self, abort: Callable[[str], None], request: ProcessedRequest) -> None:
        """`abort` takes the request's id."""
        self.request = request
        self.context = copy_context()
        """The HTTP request's: its id in log lines, its trace."""
        self.expiry: asyncio.TimerHandle | None = None
        """Ends it after its deadline, whatever P1 does."""
        self._abort = abort
        self._queue: asyncio.Queue[RequestOutput | RequestError] = asyncio.Queue()
        self._is_done = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_done and self._queue.empty():
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, RequestError):
            raise item
        return item

    def put(self, item: RequestOutput | RequestError) -> None:
        """Queue an output, or the error that ends the stream."""
        self._is_done = isinstance(item, RequestError) or item.finished
        self._queue.put_nowait(item)

    def cancel(self) -> None:
        """Abort the request; whoever reads the stream gets RequestCancelledError."""
        if not self._is_done:
            self._abort(self.request.request_id)
            self.put(RequestCancelledError())

    def close(self) -> None:
        """Abort the request unless it has finished."""
        if not self._is_done:
            self._is_done = True
            self._abort(self.request.request_id)


@dataclass(slots=True, kw_only=True)
class PendingRequest:
    """A request that is being processed in a thread."""

    is_stream: bool
    num_seqs: int
    cancellation: Cancellation = field(default_factory=Cancellation)
    """Set when the client has left."""
    handle: RequestStream | None = None
    reservation: TokenReservation | None = None
    """Room for its prompt, until it is counted by its handle."""
    times: RequestTimes = field(default_factory=lambda: RequestTimes(arrived_at=time.monotonic()))

    @property
    def is_cancelled(self) -> bool:
        return self.cancellation.is_set
