"""What P0 asks of P1 as a whole: other weights, sleep, a pause; and tells the next P1 of.

The adapters of P1, as P0 knows them: requests may name those that are loaded.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path

from mmjax.errors import EngineUnavailableError, ModelNotFoundError, RequestValueError
from mmjax.system.logger import get_logger
from mmjax.transport.messages import (
    AdapterLoaded,
    ControlAction,
    ControlEngine,
    EngineChanged,
    EngineMessage,
    LoadAdapter,
    UnloadAdapter,
    UpdateMode,
)

logger = get_logger(__name__)

_AGAIN = 0
"""The number of messages that let a new P1 be as the last one was."""


class AdapterClient:
    """Loads and unloads adapters in P1, and tells the next P1 of them."""

    def __init__(self, modules: Mapping[str, str], put: Callable[[EngineMessage], None]) -> None:
        """`modules`: those that P1 loads itself at its start, by name; `put` sends a message."""
        self._modules = dict(modules)
        self._paths = dict(modules)
        self._put = put
        self._loading: dict[str, tuple[str, asyncio.Future[None]]] = {}
        """Path and what is waited for, by name."""

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self._paths)

    async def load(self, lora_name: str, path: Path) -> None:
        """Load an adapter from a directory; RequestError if P1 cannot."""
        if lora_name in self._paths or lora_name in self._loading:
            raise RequestValueError(
                f"adapter `{lora_name}` is loaded already; unload it first, or give this one "
                "another name",
                param="lora_name",
            )
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loading[lora_name] = str(path), loaded
        # Also if the client leaves meanwhile: P1 goes on.
        loaded.add_done_callback(partial(self._note_loaded, lora_name, str(path)))
        self._put(LoadAdapter(lora_name=lora_name, lora_path=str(path)))
        await asyncio.shield(loaded)

    def unload(self, lora_name: str) -> None:
        """Forget an adapter; requests that name it go on. ModelNotFoundError if it is unknown."""
        if self._paths.pop(lora_name, None) is None:
            raise ModelNotFoundError(
                f"adapter `{lora_name[:128]}` is not loaded; `/v1/models` lists those that are",
                param="lora_name",
            )
        self._put(UnloadAdapter(lora_name=lora_name))

    def _note_loaded(self, lora_name: str, path: str, loaded: "asyncio.Future[None]") -> None:
        del self._loading[lora_name]
        if loaded.exception() is None:
            self._paths[lora_name] = path

    # ---- events of P1 ---------------------------------------------------------------------------

    def on_loaded(self, message: AdapterLoaded) -> None:
        """Note what became of an adapter."""
        error = None if message.error is None else message.error.to_error()
        _, loading = self._loading.get(message.lora_name, ("", None))
        if loading is not None and not loading.done():
            if error is None:
                loading.set_result(None)
            else:
                loading.set_exception(error)
        elif error is not None:
            logger.error("adapter %s is lost: %s", message.lora_name, error)
            self._paths.pop(message.lora_name, None)

    def on_exit(self) -> None:
        """Fail what was being loaded."""
        for _, loading in self._loading.values():
            if not loading.done():
                loading.set_exception(
                    EngineUnavailableError("the engine was lost meanwhile; load the adapter again")
                )

    def on_ready(self) -> None:
        """Give a new P1, which has those of its start, the adapters of the last one."""
        for name, path in self._modules.items():
            if self._paths.get(name) != path:
                self._put(UnloadAdapter(lora_name=name))
        for name, path in self._paths.items():
            if self._modules.get(name) != path:
                self._put(LoadAdapter(lora_name=name, lora_path=path))
        # What was asked since the last one ended may not have reached this one, or may have.
        for name, (path, loading) in self._loading.items():
            if not loading.done():
                self._put(UnloadAdapter(lora_name=name))
                self._put(LoadAdapter(lora_name=name, lora_path=path))


class ControlClient:
    """Changes P1, and knows what it is like."""

    def __init__(self, put: Callable[[EngineMessage], None]) -> None:
        """`put` sends a message."""
        self._put = put
        self._numbers = count(1)
        self._waiting: dict[int, tuple[ControlEngine, asyncio.Future[None]]] = {}
        self._weights_path: str | None = None
        """The directory of the present weights; None: they are those of the start."""
        self._weights_mark = ""
        self._sleep_level = 0
        self.weights_version = 0
        self.weights_error: str | None = None
        """Why P1 has no weights to serve requests with."""
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
        self._note_error(reply)
        if reply.number != _AGAIN:
            # Else it is on its way to what the last P1 was, and may end before it is there.
            self.is_sleeping, self.is_paused = reply.is_sleeping, reply.is_paused
        message, changed = self._waiting.pop(reply.number, (None, None))
        if message is None or changed is None:
            if reply.error is not None:
                logger.error("the engine is not as it was: %s", reply.error.message)
            return
        if reply.error is None:
            self._note(message, reply)
        if not changed.done():
            if reply.error is None:
                changed.set_result(None)
            else:
                changed.set_exception(reply.error.to_error())
                # Nobody may wait for it any more.
                changed.exception()

    def _note_error(self, reply: EngineChanged) -> None:
        if not reply.lacks_weights:
            self.weights_error = None
        elif self.weights_error is None:
            cause = "" if reply.error is None else f": {reply.error.message}"
            self.weights_error = (
                f"the engine process was started again, and weights of version "
                f"{reply.weights_version} could not be read again{cause}; give weights by "
                "`/update_weights`, or start the server again"
            )

    def _note(self, message: ControlEngine, reply: EngineChanged) -> None:
        self._weights_mark = reply.weights_mark
        match message.action:
            case "load_weights":
                self._weights_path = message.path
                # One that sleeps holds them from now on.
                self._sleep_level = min(self._sleep_level, 1)
            case "sleep":
                # What is freed stays so at a lower level.
                self._sleep_level = max(self._sleep_level, message.level)
            case "wake_up":
                self._sleep_level = 0
            case "pause" | "resume":
                pass

    def on_exit(self) -> None:
        """Fail what is being changed."""
        # The next P1 may be able to read its weights.
        self.weights_error = None
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
        if self.weights_version:
            again.append(
                ControlEngine(
                    number=_AGAIN,
                    action="load_weights",
                    path=self._weights_path,
                    weights_version=self.weights_version,
                    weights_mark=self._weights_mark,
                )
            )
        if self.is_sleeping:
            again.append(ControlEngine(number=_AGAIN, action="sleep", level=self._sleep_level))
        if self.is_paused:
            again.append(ControlEngine(number=_AGAIN, action="pause"))
        # What was asked since the last one ended may not have reached this one.
        for message in (*again, *(message for message, _ in self._waiting.values())):
            self._put(message)
