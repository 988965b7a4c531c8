"""uvicorn's connections with limits: on their number, on the headers, on the time for them."""

import asyncio
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmjax.server.openai.errors import plain_error_response
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

_MAX_READ_BYTES = 2**16


class LimitedProtocol(H11Protocol):
    """One connection."""

    max_connections = 0
    head_timeout_s = 0.0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Take the connection, or close it."""
        if len(self.connections) >= self.max_connections:
            logger.warning("closed a connection: %d are open already", self.max_connections)
            # What uvicorn does at a connection's end needs it.
            self.transport = transport
            transport.abort()
            return
        # asyncio's: what one turn of the event loop reads of one connection. Its 256 KiB take 1 ms,
        # which many connections with pictures would hold the loop for, each.
        transport.max_size = _MAX_READ_BYTES
        self.access_log = False  # AccessMiddleware's
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Read what has come; the time for a request's headers begins with its first byte."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        if self.head_timeout_s:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._close_headless)

    def _close_headless(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def limited_protocol(*, max_connections: int, head_timeout_s: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with limits; `head_timeout_s` 0: none."""
    limits = {"max_connections": max_connections, "head_timeout_s": head_timeout_s}
    return type("LimitedProtocol", (LimitedProtocol,), limits)


class HeaderLimitMiddleware:
    """Refuses requests with too many headers, or too large ones.

    h11 limits the size too, but not of what comes in one piece.
    """

    def __init__(self, app: ASGIApp, *, max_headers: int, max_bytes: int) -> None:
        self._app = app
        self._max_headers = max_headers
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 431."""
        if scope["type"] != "http" or self._is_small(scope["headers"]):
            await self._app(scope, receive, send)
            return
        response = plain_error_response(
            431,
            f"the request has more than {self._max_headers} headers, or more than "
            f"{self._max_bytes} bytes of them; send fewer",
            code="http_431",
            headers={"Connection": "close"},
        )
        await response(scope, receive, send)

    def _is_small(self, headers: list[tuple[bytes, bytes]]) -> bool:
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        return len(headers) <= self._max_headers and num_bytes <= self._max_bytes
