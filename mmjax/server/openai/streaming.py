"""Server-sent events: `data: {json}` lines, keep-alive comments, `[DONE]` at the end."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mmjax.errors import RequestCancelledError, RequestError
from mmjax.frontend.engine_client.request_stream import RequestStream
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.server.openai.continuation import CONTINUATION
from mmjax.server.openai.errors import (
    ErrorBody,
    error_body,
    internal_error_body,
    messages_error,
)
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""The outputs of several streams, each with its stream's number."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

MEDIA_HASHES_HEADER = "x-media-hashes"
MAX_HASHES = 64
"""Hashes that a response names, so that its headers stay within what proxies take."""


STAYS = "mmjax.stays"
"""Entry of the scope of a request whose client cannot leave: a line of a batch."""


class Framing(NamedTuple):
    """How events are written."""

    event: Callable[[Any], bytes]
    error: Callable[[ErrorBody], bytes]
    end: bytes


def _data(event: Any) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def _named(event: Mapping[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\n" + _data(event)


def _named_error(body: ErrorBody) -> bytes:
    info = body.error
    return _named(
        {"type": "error", "code": info.code, "message": info.message, "param": info.param}
    )


PLAIN_EVENTS = Framing(event=_data, error=_data, end=DONE)
"""The events of chat and completions."""

NAMED_EVENTS = Framing(event=_named, error=_named_error, end=b"")
"""The events of responses: a line names each one's type, and the last type is the end."""

MESSAGE_EVENTS = Framing(
    event=_named, error=lambda body: _named(messages_error(body.error)), end=b""
)
"""The events of Anthropic's messages."""


class EventStream(StreamingResponse):
    """Streams events (Structs), and closes `streams` at the end of the response."""

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        streams: Sequence[RequestStream],
        *,
        keep_alive_s: float,
        framing: Framing = PLAIN_EVENTS,
    ) -> None:
        super().__init__(
            _lines(events, keep_alive_s, framing),
            media_type="text/event-stream",
            headers={
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **media_headers(streams),
            },
        )
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; close `streams` also if the client disconnects before the first."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for stream in self._streams:
                stream.close()


def media_headers(streams: Sequence[RequestStream]) -> Mapping[str, str]:
    """Return the header by which a gateway learns what a request's media are called here."""
    hashes = [item.mm_hash for stream in streams for item in stream.request.items]
    if not hashes:
        return {}
    # In the prompt's order; a trusted id may hold any character.
    shown = [quote(mm_hash, safe="") for mm_hash in dict.fromkeys(hashes)]
    return {MEDIA_HASHES_HEADER: ",".join(shown[:MAX_HASHES])}


async def _lines(
    events: AsyncGenerator[Any, None], keep_alive_s: float, framing: Framing
) -> AsyncIterator[bytes]:
    continuation = CONTINUATION.get()
    try:
        async for event in kept_alive(events, keep_alive_s):
            if continuation is not None and continuation.is_lost:
                # Another server goes on with it.
                return
            if event is None:
                yield KEEP_ALIVE
            elif continuation is None or continuation.count_event():
                yield framing.event(event)
    except RequestError as error:
        if continuation is not None and continuation.is_lost:
            return
        # The status is sent already: send the error as an event.
        yield framing.error(error_body(error))
    except Exception:
        logger.exception("a stream failed")
        yield framing.error(internal_error_body())
    finally:
        await events.aclose()
    if framing.end:
        yield framing.end


async def kept_alive(
    events: AsyncGenerator[Any, None], interval_s: float
) -> AsyncGenerator[Any | None, None]:
    """Yield the events, and None whenever there was none for `interval_s`."""
    pending: asyncio.Task[Any] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({pending}, timeout=interval_s or None)
            if not done:
                yield None
                continue
            finished, pending = pending, None
            try:
                event = finished.result()
            except StopAsyncIteration:
                return
            yield event
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


async def merge(streams: list[RequestStream]) -> Outputs:
    """Yield (index of the stream, output) as they come; closing it closes all streams."""
    if len(streams) == 1:
        # A single stream needs no tasks.
        try:
            async for output in streams[0]:
                yield 0, output
        finally:
            streams[0].close()
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            index, item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            stream.close()


async def _pump(
    index: int,
    stream: RequestStream,
    queue: "asyncio.Queue[tuple[int, RequestOutput | Exception | None]]",
) -> None:
    try:
        async for output in stream:
            queue.put_nowait((index, output))
        queue.put_nowait((index, None))
    except Exception as error:
        queue.put_nowait((index, error))


async def collect(
    request: Request, streams: list[RequestStream], take: Callable[[int, RequestOutput], object]
) -> None:
    """Call `take` with every output; on disconnect abort all: RequestCancelledError."""

    async def read() -> None:
        outputs = merge(streams)
        try:
            async for index, output in outputs:
                take(index, output)
        finally:
            await outputs.aclose()

    await while_connected(request, read())


async def begin(
    request: Request,
    streams: list[RequestStream],
    shown: Callable[[Outputs], Outputs] = lambda outputs: outputs,
) -> Outputs:
    """Wait for the first output of any stream, and return `shown(merge(streams))`.

    An error before that is raised here, where it can still set the response's status. On
    disconnect abort all: RequestCancelledError.
    """
    outputs = merge(streams)
    try:
        first = await while_connected(request, anext(outputs))
    except BaseException:
        await outputs.aclose()
        raise
    continuation, joined = CONTINUATION.get(), shown(join(first, outputs))
    return joined if continuation is None else continuation.marked(joined)


async def join(first: T, rest: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield `first`, then the rest, which is closed at the end."""
    try:
        yield first
        async for item in rest:
            yield item
    finally:
        await rest.aclose()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; on disconnect cancel it: RequestCancelledError.

    As `asyncio.timeout` does, in this task: a task of its own would be turns of the event loop.
    """
    if STAYS in request.scope:
        return await work
    working = cast("asyncio.Task[Any]", asyncio.current_task())
    num_cancels = working.cancelling()
    leaving = asyncio.create_task(_wait_for_disconnect(request))
    is_over = has_left = False

    def stop(left: asyncio.Task[None]) -> None:
        nonlocal has_left
        if not left.cancelled():
            left.exception()
            has_left = not is_over
        if has_left:
            working.cancel()

    leaving.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and working.cancelling() <= num_cancels + 1:
            raise RequestCancelledError from None
        # Somebody else has cancelled this task, too.
        raise
    finally:
        is_over = True
        leaving.cancel()
        if has_left:
            working.uncancel()


async def _wait_for_disconnect(request: Request) -> None:
    # The body was read before: the next message is the disconnect.
    while (await request.receive())["type"] != "http.disconnect":
        pass
