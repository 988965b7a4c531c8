"""/v1/load_lora_adapter and /v1/unload_lora_adapter, for the clients that an operator trusts."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from mmjax.config.lora_config import ADAPTER_NAME
from mmjax.errors import RequestValueError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.models.model_source import ADAPTER_FILES
from mmjax.server.openai.errors import json_response
from mmjax.server.openai.protocol import Strict

AdapterName = Annotated[str, Field(pattern=ADAPTER_NAME)]


class LoadAdapterRequest(Strict):
    """POST /v1/load_lora_adapter."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A directory below `--lora-dir`: whole, or as seen from there."""


class UnloadAdapterRequest(Strict):
    """POST /v1/unload_lora_adapter."""

    lora_name: AdapterName


class AdapterService:
    """Loads and unloads adapters."""

    def __init__(self, client: AsyncEngineClient, lora_dir: Path) -> None:
        self._client = client
        self._lora_dir = lora_dir

    async def load(self, body: LoadAdapterRequest) -> Response:
        """Serve /v1/load_lora_adapter."""
        if body.lora_name in self._client.input_processor.model_config.public_names:
            raise RequestValueError(
                "`lora_name` is a name of the model itself; give the adapter another one",
                param="lora_name",
            )
        await self._client.load_adapter(body.lora_name, self._resolve(body.lora_path))
        return json_response({"message": f"adapter `{body.lora_name}` is loaded"})

    def unload(self, body: UnloadAdapterRequest) -> Response:
        """Serve /v1/unload_lora_adapter."""
        self._client.adapters.unload(body.lora_name)
        return json_response({"message": f"adapter `{body.lora_name}` is unloaded"})

    def _resolve(self, text: str) -> Path:
        """Return a directory below `lora_dir`, links resolved, whose files are there, too."""
        try:
            root = self._lora_dir.resolve(strict=True)
            path = (root / text).resolve(strict=True)
            files = [(path / name).resolve(strict=True) for name in ADAPTER_FILES]
        except (OSError, ValueError, RuntimeError):
            raise _refused() from None
        if not all(one.is_relative_to(root) for one in (path, *files)):
            raise _refused()
        return path


def _refused() -> RequestValueError:
    # The same for all reasons: a client does not learn what is elsewhere.
    return RequestValueError(
        f"`lora_path` is no directory below `--lora-dir` that holds {' and '.join(ADAPTER_FILES)}",
        param="lora_path",
    )
