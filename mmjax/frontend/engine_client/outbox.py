"""Messages to P1, sent one after another in the order in which they were put."""

import asyncio
from collections.abc import Awaitable, Callable

from mmjax.logger import get_logger
from mmjax.transport.messages import EngineCoreRequest, EngineMessage

logger = get_logger(__name__)


class Outbox:
    """A queue with a task that empties it."""

    def __init__(
        self,
        send: Callable[[EngineMessage], Awaitable[None]],
        on_unsent: Callable[[EngineCoreRequest], None],
    ) -> None:
        """`on_unsent` hears of requests that no frame can hold."""
        self._send = send
        self._on_unsent = on_unsent
        self._queue: asyncio.Queue[EngineMessage] = asyncio.Queue()
        self._mailer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to send."""
        self._mailer = asyncio.create_task(self._send_all(), name="send-mail")

    async def close(self) -> None:
        """Stop; what is queued stays unsent."""
        if self._mailer is not None:
            self._mailer.cancel()
            await asyncio.gather(self._mailer, return_exceptions=True)

    def put(self, message: EngineMessage) -> None:
        """Queue a message."""
        self._queue.put_nowait(message)

    def clear(self) -> None:
        """Forget what is queued."""
        while not self._queue.empty():
            self._queue.get_nowait()

    async def _send_all(self) -> None:
        while True:
            message = await self._queue.get()
            try:
                await self._send(message)
            except Exception:
                logger.exception("a message could not be sent to P1")
                self._take_back(message)

    def _take_back(self, message: EngineMessage) -> None:
        if isinstance(message, EngineCoreRequest):
            try:
                self._on_unsent(message)
            except Exception:
                # The next messages still have to go.
                logger.exception("request %s could not be taken back", message.request_id)
