"""What P0 asks of P1 as a whole: other weights, sleep, a pause; and tells the next P1 of."""

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path

from mmjax.errors import EngineUnavailableError
from mmjax.system.logger import get_logger
from mmjax.transport.messages import (
    ControlAction,
    ControlEngine,
    EngineChanged,
    EngineMessage,
    UpdateMode,
)

logger = get_logger(__name__)


class ControlClient:
    """Changes P1, and knows what it is like."""

    def __init__(self, put: Callable[[EngineMessage], None]) -> None:
        """`put` sends a message."""
        self._put = put
        self._numbers = count(1)
        self._waiting: dict[int, tuple[ControlEngine, asyncio.Future[None]]] = {}
        self._weights: ControlEngine | None = None
        """The message that has loaded the present weights; None: they are those of the start."""
        self._sleep_level = 0
        self.weights_version = 0
        self.is_sleeping = self.is_paused = False

    async def change(
        self,
        action: ControlAction,
        *,
        mode: UpdateMode = "wait",
        level: int = 1,
        path: Path | None = None,
    ) -> None:
        """Change P1, and wait until that is done; RequestError if it cannot be."""
        message = ControlEngine(
            number=next(self._numbers),
            action=action,
            mode=mode,
            level=level,
            path=None if path is None else str(path),
        )
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[message.number] = (message, changed)
        self._put(message)
        # Also if the client leaves meanwhile: P1 goes on.
        await asyncio.shield(changed)

    # ---- events of P1 ---------------------------------------------------------------------------

    def on_changed(self, reply: EngineChanged) -> None:
        """Take in what became of a message, and what P1 is like behind it."""
        self.weights_version = reply.weights_version
        self.is_sleeping, self.is_paused = reply.is_sleeping, reply.is_paused
        message, changed = self._waiting.pop(reply.number, (None, None))
        if message is None or changed is None:
            if reply.error is not None:
                logger.error("the engine is not as it was: %s", reply.error.message)
            return
        if reply.error is None:
            self._note(message)
        if not changed.done():
            if reply.error is None:
                changed.set_result(None)
            else:
                changed.set_exception(reply.error.to_error())
                # Nobody may wait for it any more.
                changed.exception()

    def _note(self, message: ControlEngine) -> None:
        if message.action == "load_weights":
            self._weights = message
        elif message.action == "sleep":
            self._sleep_level = message.level

    def on_exit(self) -> None:
        """Fail what is being changed."""
        for _, changed in self._waiting.values():
            if not changed.done():
                changed.set_exception(
                    EngineUnavailableError("the engine was lost meanwhile; try again")
                )
                changed.exception()
        self._waiting.clear()

    def on_ready(self) -> None:
        """Let a new P1 be as the last one was, before any request."""
        again: list[ControlEngine] = []
        if self._weights is not None:
            again.append(
                ControlEngine(
                    number=0,
                    action="load_weights",
                    path=self._weights.path,
                    weights_version=self.weights_version,
                )
            )
        if self.is_sleeping:
            again.append(ControlEngine(number=0, action="sleep", level=self._sleep_level))
        if self.is_paused:
            again.append(ControlEngine(number=0, action="pause"))
        # What was asked since the last one ended may not have reached this one.
        for message in (*again, *(message for message, _ in self._waiting.values())):
            self._put(message)
