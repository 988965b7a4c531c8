"""A request as its reader sees it, and what observers are told of it: metrics, the log, traces."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Literal

from mmjax.errors import RequestCancelledError, RequestError
from mmjax.frontend.output.outputs import FinishedSequence, NewTokens, RequestOutput
from mmjax.frontend.requests.request import ProcessedRequest

EndReason = Literal["abort", "error"]


class RequestStream:
    """An async iterator over the outputs of one request; `close` aborts it."""

    def __init__(self, request: ProcessedRequest, abort: Callable[[str], None]) -> None:
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


class RequestObserver:
    """Is called in the event loop, in the context of the HTTP request; must not block.

    `on_tokens` is about several requests, and so in the context of none. What a class leaves out
    does nothing.
    """

    def on_added(self, request: ProcessedRequest) -> None:
        """Take note of a request that was processed, and goes to P1."""

    def on_tokens(self, step: Sequence[NewTokens]) -> None:
        """Take note of the tokens of a step."""

    def on_finished(self, sequence: FinishedSequence) -> None:
        """Take note of a finished sequence."""

    def on_broken_off(self, request: ProcessedRequest, reason: EndReason) -> None:
        """Take note of a request that ended before all of its sequences were finished."""
