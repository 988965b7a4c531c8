"""One replica: an application with its engine process, called without HTTP in between."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Scope

from mmjax.config.engine_config import EngineConfig, ServerConfig
from mmjax.deploy.gang import Gang, Member
from mmjax.server import make_app
from mmjax.server.openai.continuation import CONTINUATION, Continuation, EventMark, SentEvents
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

Headers = list[tuple[bytes, bytes]]


class ForwardedRequest(NamedTuple):
    """An HTTP request that a front gives to a replica."""

    method: str
    path: str
    query_string: bytes
    headers: Headers
    body: bytes
    key: str
    """Random, and the same for each try: ids and seeds follow from it."""
    created: int
    """When it came to the front, in seconds since 1970."""
    age_s: float = 0.0
    """Seconds since then: deadlines count on."""
    attempt: int = 0
    sent: SentEvents | None = None
    """The events that the client has from earlier tries."""
    held_key: str | None = None
    """What its answer is held by, for a client that comes again."""
    is_search: bool = False
    """Whether only a held answer is asked for."""


class ResponseHead(NamedTuple):
    """The first thing that a replica answers."""

    replica: str
    status: int
    headers: Headers


class ResponsePart(NamedTuple):
    """A part of the response's body."""

    body: bytes
    mark: EventMark | None
    """Of the event that the part is, if it is one that tells of the answer."""


class ResponseEnd(NamedTuple):
    """The last thing that a replica answers."""

    is_whole: bool
    """Else the engine was lost, and another replica must go on."""


class NotHeld(NamedTuple):
    """All that a replica answers to a search for what it does not hold."""

    replica: str


ResponseItem = ResponseHead | ResponsePart | ResponseEnd | NotHeld


class Replica:
    """An application that serves, with its engine process."""

    def __init__(self, name: str, app: FastAPI, supervisor: Any, gang: Gang | None = None) -> None:
        """`app`, `supervisor`: as `make_app` returns them; `gang`: who follows its P1."""
        self.name = name
        self.app = app
        self.supervisor = supervisor
        self._gang = gang
        self._stack = AsyncExitStack()

    @classmethod
    async def start(
        cls,
        name: str,
        engine: EngineConfig,
        server: ServerConfig,
        members: Sequence[Member] = (),
    ) -> "Replica":
        """Start it, and wait until the engine is ready.

        `members`: the followers, if `engine` is process 0 of several.
        """
        app, supervisor = await asyncio.to_thread(make_app, engine, server)
        replica = cls(name, app, supervisor, Gang(supervisor, members) if members else None)
        await replica.open()
        return replica

    async def open(self) -> None:
        """Run the application's lifespan until `close`; wait until the engine is ready."""
        if self._gang is not None:
            # Left last: P1 tells its followers that it ends.
            self._gang.open()
            self._stack.push_async_callback(self._gang.close)
        try:
            await self._stack.enter_async_context(self.app.router.lifespan_context(self.app))
            await self.supervisor.wait_ready()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the engine process."""
        await self._stack.aclose()

    def without_lifespan(self) -> FastAPI:
        """Return the application for a server that runs lifespans: `open` has run its own."""
        self.app.router.lifespan_context = _no_lifespan
        return self.app

    def check_health(self) -> None:
        """Raise RuntimeError if the engine cannot be brought back here.

        While it is restarted here, this replica is healthy: a new one would take longer.
        """
        if self.supervisor.state == "dead":
            raise RuntimeError("the engine process could not be brought back; see its log")
        if self._gang is not None:
            self._gang.check()

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[ResponseItem, None]:
        """Yield the response: a head, parts, and the end. Closing it ends the request."""
        continuation = Continuation(
            request.key,
            created=request.created,
            age_s=request.age_s,
            attempt=request.attempt,
            sent=request.sent,
        )
        async with aclosing(_call(self.app, request, continuation)) as items:
            async for item in items:
                yield item._replace(replica=self.name) if isinstance(item, ResponseHead) else item


@runtime_checkable
class Replicas(Protocol):
    """What a front forwards to."""

    def respond(
        self, request: ForwardedRequest, *, keys: list[str], avoided: list[str]
    ) -> AsyncGenerator[ResponseItem, None]:
        """Yield a replica's response; ReplicaLostError if it dies.

        Args:
            request: The request.
            keys: `affinity_keys` of it.
            avoided: Replicas that have failed it.
        """
        ...


class ReplicaLostError(Exception):
    """A replica died in the middle of a request."""


@asynccontextmanager
async def _no_lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield


async def _call(
    app: ASGIApp, request: ForwardedRequest, continuation: Continuation
) -> AsyncGenerator[ResponseItem, None]:
    """Call an ASGI application, and yield what it sends."""
    items: asyncio.Queue[ResponseItem] = asyncio.Queue()
    body, has_left = [request.body], asyncio.Event()
    is_over = False

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal is_over
        if message["type"] == "http.response.start":
            items.put_nowait(ResponseHead("", message["status"], list(message["headers"])))
        elif message["type"] == "http.response.body":
            if message.get("body"):
                items.put_nowait(ResponsePart(bytes(message["body"]), continuation.take_mark()))
            is_over |= not message.get("more_body", False)

    async def run() -> None:
        CONTINUATION.set(continuation)
        try:
            await app(_scope(request), receive, send)
        except Exception:
            logger.exception("the application failed on a request")
        items.put_nowait(ResponseEnd(is_over and not continuation.is_lost))

    running = asyncio.create_task(run())
    try:
        while not isinstance(item := await items.get(), ResponseEnd):
            yield item
        yield item
    finally:
        has_left.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _scope(request: ForwardedRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query_string,
        "root_path": "",
        "headers": request.headers,
        "client": None,
        "server": None,
        "state": {},
    }
