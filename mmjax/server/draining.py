"""uvicorn's server, whose end begins with the requests that have not begun yet."""

import socket
from types import FrameType

import uvicorn

from mmjax.server.openai.request_body import RequestReader
from mmjax.server.shutdown import Shutdown


class DrainingServer(uvicorn.Server):
    """Ends at `shutdown`'s word: half-sent bodies at once, running requests in their time."""

    def __init__(self, config: uvicorn.Config, *, shutdown: Shutdown, reader: RequestReader):
        super().__init__(config)
        self._shutdown = shutdown
        self._reader = reader
        shutdown.drain_with(self._drain)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal."""
        # NOTE: not kept in uvicorn's own list, which it would raise again after the end.
        self._shutdown.on_signal(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close."""
        self._reader.stop()
        await super().shutdown(sockets)

    def _drain(self) -> None:
        self.should_exit = True
