"""Routes that change the engine, for clients that an operator trusts: adapters, weights, sleep."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI
from pydantic import BaseModel, Field, StrictBool, StrictInt
from starlette.requests import Request
from starlette.responses import Response

from mmjax.config.lora_config import ADAPTER_NAME
from mmjax.errors import RequestError, RequestValueError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.models.model_source import ADAPTER_FILES
from mmjax.server.openai.errors import JsonResponse
from mmjax.server.openai.protocol import Label, Strict
from mmjax.server.openai.request_body import validated
from mmjax.transport.messages import UpdateMode


class ControlQuery(BaseModel):
    """What stands behind the `?` of an address; what mmjax does not know has no effect."""

    mode: UpdateMode = "wait"
    """What becomes of requests in work."""
    level: Annotated[int, Field(ge=1, le=2)] = 1
    """Of /sleep: 2 frees the weights' memory, too."""


class UpdateWeightsRequest(Strict):
    """POST /update_weights."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A checkpoint's directory below `--weights-dir`: whole, or as seen from there."""
    mode: UpdateMode = "wait"
    """What becomes of requests in work: they are finished before, go on by the new weights behind
    the tokens that they have, or end."""


class ControlService:
    """Changes the engine as a whole."""

    def __init__(self, client: AsyncEngineClient, weights_dir: Path | None) -> None:
        """Load weights from below `weights_dir`; None: from nowhere."""
        self._client = client
        self._weights_dir = weights_dir

    def add_to(self, app: FastAPI) -> None:
        """Add the routes without a body."""
        routes = (self.sleep, self.wake_up, self.pause, self.resume)
        for serve in routes:
            app.add_api_route(f"/{serve.__name__}", serve, methods=["POST"])
        for serve in (self.is_sleeping, self.is_paused):
            app.add_api_route(f"/{serve.__name__}", serve, methods=["GET"])

    async def sleep(self, request: Request) -> Response:
        """Serve /sleep: free the caches' memory until /wake_up; requests wait."""
        query = _read_query(request)
        await self._client.change_engine("sleep", level=query.level, mode=query.mode)
        return self._tell()

    async def wake_up(self) -> Response:
        """Serve /wake_up."""
        await self._client.change_engine("wake_up")
        return self._tell()

    async def pause(self, request: Request) -> Response:
        """Serve /pause: compute nothing until /resume; requests wait."""
        query = _read_query(request)
        await self._client.change_engine("pause", mode=query.mode)
        return self._tell()

    async def resume(self) -> Response:
        """Serve /resume."""
        await self._client.change_engine("resume")
        return self._tell()

    async def is_sleeping(self) -> Response:
        """Serve /is_sleeping."""
        return JsonResponse({"is_sleeping": self._client.control.is_sleeping})

    async def is_paused(self) -> Response:
        """Serve /is_paused."""
        return JsonResponse({"is_paused": self._client.control.is_paused})

    async def update_weights(self, _: Request, body: UpdateWeightsRequest) -> Response:
        """Serve /update_weights."""
        if self._weights_dir is None:
            raise RequestValueError.about("path", "cannot be given without `--weights-dir`")
        refusal = RequestValueError.about(
            "path", "is no directory below `--weights-dir` that holds safetensors files"
        )
        path = _resolve_below(self._weights_dir, body.path, ["*.safetensors*"], refusal)
        await self._client.change_engine("load_weights", mode=body.mode, path=path)
        return self._tell()

    def _tell(self) -> Response:
        control = self._client.control
        return JsonResponse(
            {
                "weights_version": control.weights_version,
                "is_sleeping": control.is_sleeping,
                "is_paused": control.is_paused,
            }
        )


def _resolve_below(root: Path, text: str, patterns: Sequence[str], refusal: RequestError) -> Path:
    """Return a directory below `root`, links of it and of its files resolved.

    Raises `refusal` unless each pattern has a file there, the same for all reasons: a client does
    not learn what is elsewhere.
    """
    try:
        root = root.resolve(strict=True)
        path = (root / text).resolve(strict=True)
        found = [[file.resolve(strict=True) for file in path.glob(one)] for one in patterns]
    except (OSError, ValueError, RuntimeError):
        raise refusal from None
    if not all(found) or not all(one.is_relative_to(root) for one in (path, *chain(*found))):
        raise refusal
    return path


def _read_query(request: Request) -> ControlQuery:
    """Return what the address asks for; RequestValueError for a body, which has no effect."""
    if int(request.headers.get("content-length", "0")) > len("{}"):
        raise RequestValueError(
            f"{request.url.path} takes no body; write `level` and `mode` into the address, as "
            "/sleep?level=2&mode=abort"
        )
    return validated(ControlQuery, dict(request.query_params))


# ---- adapters ------------------------------------------------------------------------------------

AdapterName = Annotated[str, Field(pattern=ADAPTER_NAME)]


class LoadAdapterRequest(Strict):
    """POST /v1/load_lora_adapter."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A directory below `--lora-dir`: whole, or as seen from there."""
    base_model_name: Label | None = None
    """No effect: all adapters are of the one model. Gateway API's sidecar sends it."""
    load_inplace: StrictBool = False


class UnloadAdapterRequest(Strict):
    """POST /v1/unload_lora_adapter."""

    lora_name: AdapterName
    base_model_name: Label | None = None
    """As above."""
    lora_int_id: StrictInt | None = None
    """vLLM's, without effect: the name says which adapter it is."""


class AdapterService:
    """Loads and unloads adapters."""

    def __init__(self, client: AsyncEngineClient, lora_dir: Path) -> None:
        self._client = client
        self._lora_dir = lora_dir

    async def load_lora_adapter(self, _: Request, body: LoadAdapterRequest) -> Response:
        """Serve /v1/load_lora_adapter."""
        if body.load_inplace:
            raise RequestValueError.about(
                "load_inplace", "is not supported; unload the adapter, and load it again"
            )
        if body.lora_name in self._client.input_processor.model_config.public_names:
            raise RequestValueError.about(
                "lora_name", "is a name of the model itself; give the adapter another one"
            )
        files = " and ".join(ADAPTER_FILES)
        refusal = RequestValueError.about(
            "lora_path", f"is no directory below `--lora-dir` that holds {files}"
        )
        path = _resolve_below(self._lora_dir, body.lora_path, ADAPTER_FILES, refusal)
        await self._client.load_adapter(body.lora_name, path)
        return JsonResponse({"message": f"adapter `{body.lora_name}` is loaded"})

    async def unload_lora_adapter(self, _: Request, body: UnloadAdapterRequest) -> Response:
        """Serve /v1/unload_lora_adapter."""
        self._client.adapters.unload(body.lora_name)
        return JsonResponse({"message": f"adapter `{body.lora_name}` is unloaded"})
