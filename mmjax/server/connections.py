"""uvicorn's server: limits on the connections' number and on their headers' time; its shutdown."""

import asyncio
import socket
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmjax.server.openai.request_body import RequestReader
from mmjax.server.shutdown import Shutdown
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
        self.access_log = False  # `log_access` has it
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


class DrainingServer(uvicorn.Server):
    """Stops when `shutdown` does: ends unread bodies at once, and waits for running requests."""

    def __init__(self, config: uvicorn.Config, *, shutdown: Shutdown, reader: RequestReader):
        super().__init__(config)
        self._shutdown = shutdown
        self._reader = reader
        shutdown.drain_with(self._drain)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Pass a signal to `shutdown`."""
        # NOTE: not in uvicorn's own list, whose signals it raises again at its end.
        self._shutdown.on_signal(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close."""
        self._reader.stop()
        await super().shutdown(sockets)

    def _drain(self) -> None:
        self.should_exit = True
