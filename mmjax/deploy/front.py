"""A front before several replicas: one HTTP address, at which no request is lost with a replica.

A request of which its client has seen nothing is given to another replica as a whole; a stream
goes on behind the events that its client has. Loads no model.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mmjax.config import ServerConfig
from mmjax.deploy.affinity_keys import affinity_keys
from mmjax.deploy.replica import (
    ForwardedRequest,
    Headers,
    ReplicaLostError,
    Replicas,
    ResponseEnd,
    ResponseHead,
    ResponseItem,
    ResponsePart,
)
from mmjax.errors import CapacityError, EngineUnavailableError, RequestTimeoutError
from mmjax.logger import REQUEST_ID, get_logger
from mmjax.server.app import add_protection
from mmjax.server.middleware import RequestIdMiddleware
from mmjax.server.openai.continuation import SentEvents
from mmjax.server.openai.errors import error_body, install_error_handlers, json_response
from mmjax.server.openai.request_body import RequestReader
from mmjax.server.openai.streaming import DONE, PLAIN_EVENTS, while_connected

logger = get_logger(__name__)

MAX_LOST = 3
"""Replicas that a request may lose before it is failed: it may be what ends them."""

_QUESTION_TIMEOUT_S = 10.0
"""For requests without a body, such as probes, if no replica is there."""
_MAX_WAIT_S = 120.0
"""That a request waits while every replica's engine restarts."""
_PAUSE_S = 0.5
_INLINE_BYTES = 64 * 2**10
"""Smaller bodies are read for keys in the event loop, in less time than a thread takes to start."""
_NOT_FORWARDED = frozenset(
    {b"connection", b"content-length", b"origin", b"transfer-encoding", b"x-request-id"}
)
_NOT_RETURNED = frozenset({b"connection", b"content-length", b"transfer-encoding", b"x-request-id"})


def create_front(replicas: Replicas, config: ServerConfig, *, max_requests: int) -> FastAPI:
    """Return the application.

    Args:
        replicas: What it forwards to.
        config: The replicas', whose keys and limits hold here, too.
        max_requests: Requests at once; more are answered by a 429.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    reader = RequestReader(config.request_body_timeout_s)
    num_requests = 0
    install_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ready"})

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def forward(request: Request) -> Response:
        return _Forwarding(await receive(request), replicas, config, count)

    async def receive(request: Request) -> ForwardedRequest:
        if num_requests >= max_requests:
            raise CapacityError(
                f"{num_requests} requests are here already; send it again in a moment"
            )
        return _to_forward(request, bytes(await reader.receive(request)))

    def count(change: int) -> None:
        nonlocal num_requests
        num_requests += change

    add_protection(app, config)
    app.add_middleware(RequestIdMiddleware)
    return app


def _to_forward(request: Request, body: bytes) -> ForwardedRequest:
    headers = [one for one in request.scope["headers"] if one[0].lower() not in _NOT_FORWARDED]
    length = (b"content-length", str(len(body)).encode())
    return ForwardedRequest(
        method=request.method,
        path=request.scope["path"].removeprefix(request.scope.get("root_path", "")),
        query_string=request.scope["query_string"],
        headers=[*headers, length, (b"x-request-id", REQUEST_ID.get().encode())],
        body=body,
        key=uuid.uuid4().hex,
        created=int(time.time()),
    )


class _Forwarding(Response):
    """The response to a forwarded request, by whichever replicas."""

    def __init__(
        self, request: ForwardedRequest, replicas: Replicas, config: ServerConfig, count: Any
    ) -> None:
        super().__init__()
        self._request = request
        self._replicas = replicas
        self._timeout_s = config.request_timeout_s if request.body else _QUESTION_TIMEOUT_S
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request until a replica has answered it."""
        self._count(1)
        try:
            request = self._request
            keys = await _keys_of(request)
            work = _Exchange(self._replicas, request, keys, self._timeout_s, send).run()
            # The body was read before: what is received next is the disconnect.
            await while_connected(Request(scope, receive), work)
        finally:
            self._count(-1)


async def _keys_of(request: ForwardedRequest) -> list[str]:
    headers: Mapping[str, str] = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers
    }
    if len(request.body) <= _INLINE_BYTES:
        return affinity_keys(headers, request.body)
    return await asyncio.to_thread(affinity_keys, headers, request.body)


class _Exchange:
    """One request's tries, and what of them its client has been shown."""

    def __init__(
        self,
        replicas: Replicas,
        request: ForwardedRequest,
        keys: list[str],
        timeout_s: float,
        send: Send,
    ) -> None:
        self._replicas = replicas
        self._request = request
        self._keys = keys
        self._send = send
        self._timeout_s = timeout_s or None
        self._timeout: asyncio.Timeout | None = None
        self._sent = SentEvents()
        self._avoided: list[str] = []
        self._num_lost = 0
        self._started_at = time.monotonic()
        self._has_begun = False
        self._is_done = False

    async def run(self) -> None:
        """Try until a replica has answered."""
        attempt = 0
        try:
            async with asyncio.timeout(self._timeout_s) as self._timeout:
                while not await self._try(attempt):
                    attempt += 1
                    if self._num_lost == MAX_LOST:
                        return await self._give_up()
        except TimeoutError:
            raise RequestTimeoutError from None

    async def _try(self, attempt: int) -> bool:
        """Give the request to a replica; return whether its client has the whole answer."""
        request = self._request._replace(attempt=attempt, sent=self._sent)
        items = self._replicas.respond(request, keys=self._keys, avoided=list(self._avoided))
        try:
            return await self._read(items)
        except ReplicaLostError:
            logger.warning("a replica was lost; its request is given to another one")
        finally:
            await items.aclose()
        self._num_lost += 1
        return self._is_done

    async def _read(self, items: AsyncGenerator[ResponseItem, None]) -> bool:
        head: ResponseHead | None = None
        held: list[bytes] = []
        async for item in items:
            match item:
                case ResponseHead():
                    head = item
                case ResponsePart() if head is not None and _is_stream(head):
                    await self._begin(head)
                    await self._show(item)
                case ResponsePart():
                    held.append(item.body)
                case ResponseEnd(is_whole=True) if head is not None:
                    return await self._end(head, b"".join(held))
                case ResponseEnd():
                    break
        if head is not None:
            self._avoided.append(head.replica)
        raise ReplicaLostError

    async def _show(self, part: ResponsePart) -> None:
        """Send a part of a stream."""
        await self._send({"type": "http.response.body", "body": part.body, "more_body": True})
        if part.mark is not None:
            self._sent.add(part.mark)
        self._is_done |= part.body == DONE

    async def _end(self, head: ResponseHead, body: bytes) -> bool:
        """End the response; return False if another replica should be asked instead."""
        if not _is_stream(head):
            if self._is_for_another(head):
                self._avoided.append(head.replica)
                return False
            if self._should_wait(head):
                self._avoided.clear()
                await asyncio.sleep(_PAUSE_S)
                return False
            if self._has_begun:
                # A stream that its replica has lost, and that no other one takes.
                await self._give_up()
                return True
            await self._begin(head, len(body))
        else:
            await self._begin(head)
            body = b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        return True

    def _is_for_another(self, head: ResponseHead) -> bool:
        """Whether a replica refused what another one may take; each is asked once."""
        is_kept_elsewhere = head.status == 404 and self._request.path.startswith("/v1/responses")
        is_refused = head.status in (429, 503) or is_kept_elsewhere
        return is_refused and head.replica not in self._avoided

    def _should_wait(self, head: ResponseHead) -> bool:
        """Whether all replicas have refused, but one may soon be there again."""
        is_in_time = time.monotonic() < self._started_at + _MAX_WAIT_S
        return head.status == 503 and bool(self._request.body) and is_in_time

    async def _begin(self, head: ResponseHead, length: int | None = None) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        if self._timeout is not None:
            # From here on, the replica's own limit holds.
            self._timeout.reschedule(None)
        headers: Headers = [one for one in head.headers if one[0].lower() not in _NOT_RETURNED]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def _give_up(self) -> None:
        error = EngineUnavailableError(
            "the engine was lost several times during this request; try again"
        )
        if not self._has_begun:
            raise error
        event = PLAIN_EVENTS.error(error_body(error)) + DONE
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _is_stream(head: ResponseHead) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in head.headers
    )
