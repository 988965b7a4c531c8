"""uvicorn's server with graceful shutdown."""

import socket
from types import FrameType

import uvicorn

from mmjax.server.openai.request_body import RequestReader
from mmjax.server.shutdown import Shutdown


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
