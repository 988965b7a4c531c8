"""The adapters of P1, as P0 knows them: requests may name those that are loaded."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from mmjax.errors import EngineUnavailableError, ModelNotFoundError, RequestValueError
from mmjax.system.logger import get_logger
from mmjax.transport.messages import AdapterLoaded, EngineMessage, LoadAdapter, UnloadAdapter

logger = get_logger(__name__)


class AdapterClient:
    """Loads and unloads adapters in P1, and tells the next P1 of them."""

    def __init__(self, modules: Mapping[str, str], put: Callable[[EngineMessage], None]) -> None:
        """`modules`: those that P1 loads itself at its start, by name; `put` sends a message."""
        self._modules = dict(modules)
        self._paths = dict(modules)
        self._put = put
        self._loading: dict[str, asyncio.Future[None]] = {}

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
        loaded = self._loading[lora_name] = asyncio.get_running_loop().create_future()
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
        loading = self._loading.get(message.lora_name)
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
        for loading in self._loading.values():
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
