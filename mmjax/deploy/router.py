"""The router before several replicas: one address, at which no request is lost with a replica.

The setting `mode` calls it `front`.

Loads no model: it reads bodies, and forwards them (`mmjax.deploy.exchange`).
"""

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mmjax.config.engine_config import ServerConfig
from mmjax.deploy.affinity import affinity_keys
from mmjax.deploy.exchange import Exchange, Patience
from mmjax.deploy.held import held_key
from mmjax.deploy.plain_errors import replace_plain_errors
from mmjax.deploy.replica import ForwardedRequest, Replicas
from mmjax.errors import CapacityError, RequestValueError
from mmjax.server.app import add_protection
from mmjax.server.middleware import set_request_id
from mmjax.server.openai.errors import JsonResponse, install_error_handlers, route_path
from mmjax.server.openai.request_body import RequestReader
from mmjax.server.openai.streaming import while_connected
from mmjax.system.logger import REQUEST_ID

_INLINE_BYTES = 64 * 2**10
"""Smaller bodies are read for keys in the event loop, in less time than a thread takes to start."""
_MAX_EVENT_DIGITS = 9
_NOT_FORWARDED = frozenset(
    {b"connection", b"content-length", b"origin", b"transfer-encoding", b"x-request-id"}
)


def create_router(
    replicas: Replicas,
    config: ServerConfig,
    *,
    max_requests: int,
    max_body_bytes: int = 2**31,
    patience: Patience | None = None,
) -> FastAPI:
    """Return the application.

    Args:
        replicas: What it forwards to.
        config: The replicas', whose keys and limits hold here, too.
        max_requests: Requests at once; more are answered by a 429.
        max_body_bytes: Of the bodies of all of them, which are kept until their responses end.
        patience: For how long requests wait for replicas.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    install_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        return JsonResponse({"status": "ready"})

    forwarding = _Forwarding(
        replicas=replicas,
        config=config,
        reader=RequestReader(config.request_body_timeout_s),
        # One body of the largest size always has room.
        room=Room(max_requests, max(max_body_bytes, config.max_request_bytes)),
        patience=patience or Patience(),
    )
    app.add_route("/{path:path}", cast(Any, forwarding), methods=["GET", "POST", "DELETE"])
    app.add_middleware(replace_plain_errors)
    add_protection(app, config)
    app.add_middleware(set_request_id)
    return app


class Room:
    """Counts the requests that are here, and the bytes of their bodies."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._num_requests = self._num_bytes = 0

    @contextmanager
    def taken(self, receive: Receive) -> Iterator[Receive]:
        """Take a place, and yield a `receive` that counts the body; CapacityError."""
        if self._num_requests >= self._max_requests:
            raise CapacityError(
                f"{self._num_requests} requests are here already; send it again in a moment"
            )
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            length = len(message.get("body", b""))
            num_bytes += length
            self._num_bytes += length
            if self._num_bytes > self._max_bytes:
                raise CapacityError(
                    f"the requests that are here have {self._max_bytes} bytes together; send it "
                    "again in a moment"
                )
            return message

        self._num_requests += 1
        try:
            yield counted
        finally:
            self._num_requests -= 1
            self._num_bytes -= num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forwarding:
    """The ASGI application that has requests answered by whichever replicas."""

    replicas: Replicas
    config: ServerConfig
    reader: RequestReader
    room: Room
    patience: Patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, and forward it until a replica has answered it."""
        with self.room.taken(receive) as counted:
            request = Request(scope, counted)
            forwarded = _to_forward(request, bytes(await self.reader.receive(request)))
            last_event = _last_event(request)
            forwarded, keys = await _with_keys(forwarded)
            exchange = Exchange(
                self.replicas,
                forwarded,
                keys,
                send,
                last_event=last_event,
                timeout_s=self.config.request_timeout_s,
                keep_alive_s=self.config.sse_keep_alive_interval_s,
                patience=self.patience,
            )
            # The body was read before: what is received next is the disconnect.
            await while_connected(Request(scope, receive), exchange.run())


def _to_forward(request: Request, body: bytes) -> ForwardedRequest:
    headers = [one for one in request.scope["headers"] if one[0].lower() not in _NOT_FORWARDED]
    length = (b"content-length", str(len(body)).encode())
    return ForwardedRequest(
        method=request.method,
        path=route_path(request.scope),
        query_string=request.scope["query_string"],
        headers=[*headers, length, (b"x-request-id", REQUEST_ID.get().encode())],
        body=body,
        key=uuid.uuid4().hex,
        created=int(time.time()),
    )


def _last_event(request: Request) -> int:
    """Return the number of the last event that a client has; it counts only with a key."""
    given = request.headers.get("last-event-id")
    if given is None or not request.headers.get("idempotency-key"):
        return 0
    if not given.isdecimal() or len(given) > _MAX_EVENT_DIGITS:
        raise RequestValueError.about(
            "Last-Event-ID", "must be the `id` of an event of this answer"
        )
    return int(given)


async def _with_keys(request: ForwardedRequest) -> tuple[ForwardedRequest, list[str]]:
    """Return the request with what its answer is held by, and its keys."""
    headers: Mapping[str, str] = {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers
    }

    def read() -> tuple[ForwardedRequest, list[str]]:
        held = request._replace(held_key=held_key(headers, request))
        return held, affinity_keys(headers, request.body)

    return read() if len(request.body) <= _INLINE_BYTES else await asyncio.to_thread(read)
