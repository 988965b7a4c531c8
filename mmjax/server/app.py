"""The FastAPI application: routes and middleware."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from msgspec.structs import replace
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from mmjax import __version__
from mmjax.config.engine_config import LoRAConfig, ServerConfig
from mmjax.errors import ConfigError, ModelNotFoundError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.engine_client.supervisor import EngineLink, EngineState
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.server.api_page import api_page
from mmjax.server.api_schema import describe, error_responses, stream_responses, takes
from mmjax.server.connections import HeaderLimitMiddleware
from mmjax.server.metrics import CONTENT_TYPE, Metrics
from mmjax.server.middleware import (
    AccessMiddleware,
    BodyLimitMiddleware,
    KeyMiddleware,
    RequestIdMiddleware,
    RoomMiddleware,
)
from mmjax.server.openai.adapters import (
    AdapterService,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from mmjax.server.openai.chat_completions import ChatService
from mmjax.server.openai.completions import CompletionService
from mmjax.server.openai.errors import install_error_handlers, json_response
from mmjax.server.openai.generation import GenerationService
from mmjax.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from mmjax.server.openai.request_body import RequestReader
from mmjax.server.openai.responses import ModelCard, ModelList
from mmjax.server.openai.responses_api.protocol import ResponsesRequest
from mmjax.server.openai.responses_api.service import ResponsesService
from mmjax.server.openai.tokenization import (
    DetokenizeRequest,
    TokenizationService,
    TokenizeRequest,
)
from mmjax.server.playground import PAGE_FILES, serve_page
from mmjax.server.request_log import RequestLog

_BODIES: tuple[type[BaseModel], ...] = (
    *(ChatCompletionRequest, CompletionRequest, ResponsesRequest),
    *(TokenizeRequest, DetokenizeRequest, LoadAdapterRequest, UnloadAdapterRequest),
)


def create_app(
    client: AsyncEngineClient,
    chat: ChatParser,
    config: ServerConfig,
    lora: LoRAConfig | None = None,
) -> FastAPI:
    """Return the application; its lifespan starts and closes the client."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await client.start()
        watching = asyncio.create_task(metrics.watch_loop(), name="watch-loop")
        try:
            yield
        finally:
            watching.cancel()
            reader.close()
            chats.close()
            await client.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    metrics = Metrics(client, lora)
    if config.enable_log_requests:
        client.observe(RequestLog(config))
    tracer = _make_tracer(client, config.otlp_traces_endpoint)
    reader = RequestReader(config.request_body_timeout_s)
    generation = GenerationService(client, config)
    chats = ChatService(client, chat, config, generation)
    app = FastAPI(
        title="mmjax",
        version=__version__,
        lifespan=lifespan,
        # FastAPI's pages would load scripts from other hosts; /docs is a page of ours.
        docs_url=None,
        redoc_url=None,
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
        # A redirect would contain the Host header, which the client chooses.
        redirect_slashes=False,
        responses=error_responses(),
    )
    app.state.request_reader = reader
    app.state.model_name = client.input_processor.model_config.public_name
    install_error_handlers(app)
    _add_generation_routes(app, chats, CompletionService(client, generation), reader)
    _add_responses_routes(app, ResponsesService(chats, generation, config), reader)
    _add_tokenization_routes(app, TokenizationService(client, chats, generation), reader)
    describe(app, _BODIES)
    if not config.disable_fastapi_docs:
        _add_docs_route(app)
    _add_model_routes(app, client, _model_card(client, chat))
    if lora is not None and lora.allow_runtime_lora_updating and lora.lora_dir is not None:
        _add_adapter_routes(app, AdapterService(client, lora.lora_dir), reader)
    _add_state_routes(app, client)
    _add_media_route(app, client, config)
    for path in PAGE_FILES:
        app.add_api_route(path, serve_page, include_in_schema=False)
    _add_metrics_route(app, metrics)
    _add_room(app, client)
    _add_middleware(app, config, metrics, tracer)
    return app


def _add_room(app: FastAPI, client: AsyncEngineClient) -> None:
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    paths = [route.path for route in routes if route.openapi_extra]
    app.add_middleware(RoomMiddleware, check_room=client.check_room, paths=paths)


def _add_middleware(app: FastAPI, config: ServerConfig, metrics: Metrics, tracer: Any) -> None:
    # The last one added is outermost: the access log, ids, traces, what protects.
    add_protection(app, config)
    if tracer is not None:
        app.add_middleware(tracer.middleware)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(
        AccessMiddleware,
        count=metrics.count_response,
        quiet_paths=config.disable_access_log_for_endpoints,
    )


def add_protection(app: FastAPI, config: ServerConfig) -> None:
    """Add the limits of bodies and headers, API keys, and the origins that may call."""
    # The last one added is outermost: the headers' number, CORS, keys, the body's size.
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_request_bytes)
    if config.api_keys:
        app.add_middleware(KeyMiddleware, api_keys=config.api_keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["DELETE", "GET", "POST"],
            # Of an origin that may call: OpenAI's client for browsers sends ten of its own.
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(
        HeaderLimitMiddleware,
        max_headers=config.h11_max_header_count,
        max_bytes=config.h11_max_incomplete_event_size,
    )


def _add_generation_routes(
    app: FastAPI, chats: ChatService, texts: CompletionService, reader: RequestReader
) -> None:
    # Bodies are read by `reader`: FastAPI would decode and validate them without limits.
    @app.post(
        "/v1/chat/completions",
        openapi_extra=takes(ChatCompletionRequest),
        responses=stream_responses(),
    )
    async def chat_completions(request: Request) -> Response:
        return await chats.chat(request, await reader.read(request, ChatCompletionRequest))

    @app.post("/v1/chat/completions/render", openapi_extra=takes(ChatCompletionRequest))
    async def render(request: Request) -> Response:
        return await chats.render(request, await reader.read(request, ChatCompletionRequest))

    @app.post(
        "/v1/completions", openapi_extra=takes(CompletionRequest), responses=stream_responses()
    )
    async def completions(request: Request) -> Response:
        return await texts.complete(request, await reader.read(request, CompletionRequest))


def _add_responses_routes(app: FastAPI, service: ResponsesService, reader: RequestReader) -> None:
    @app.post("/v1/responses", openapi_extra=takes(ResponsesRequest), responses=stream_responses())
    async def responses(request: Request) -> Response:
        return await service.create(request, await reader.read(request, ResponsesRequest))

    @app.post("/v1/responses/input_tokens", openapi_extra=takes(ResponsesRequest))
    async def input_tokens(request: Request) -> Response:
        return await service.count(request, await reader.read(request, ResponsesRequest))

    @app.get("/v1/responses/{response_id}")
    async def response(request: Request, response_id: str) -> Response:
        return service.retrieve(request, response_id)

    @app.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        return service.delete(request, response_id)

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        return service.input_items(request, response_id)

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        return service.cancel(request, response_id)


def _add_tokenization_routes(
    app: FastAPI, service: TokenizationService, reader: RequestReader
) -> None:
    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        return await service.tokenize(request, await reader.read(request, TokenizeRequest))

    @app.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        return await service.detokenize(request, await reader.read(request, DetokenizeRequest))


def _add_docs_route(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return api_page(app.openapi(), app.root_path)


def _add_model_routes(app: FastAPI, client: AsyncEngineClient, card: ModelCard) -> None:
    names = client.input_processor.model_config.public_names

    def cards() -> list[ModelCard]:
        adapters = client.adapters.names
        own = (replace(card, id=one) for one in names)
        return [*own, *(replace(card, id=one, root=one, parent=card.id) for one in adapters)]

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(ModelList(data=cards()))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        found = next((one for one in cards() if one.id == name), None)
        if found is None:
            raise ModelNotFoundError(
                f"this server does not serve `{name[:128]}`; it serves `{card.id}`", param="model"
            )
        return json_response(found)


def _add_adapter_routes(app: FastAPI, service: AdapterService, reader: RequestReader) -> None:
    @app.post("/v1/load_lora_adapter", openapi_extra=takes(LoadAdapterRequest))
    async def load_lora_adapter(request: Request) -> Response:
        return await service.load(await reader.read(request, LoadAdapterRequest))

    @app.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadAdapterRequest))
    async def unload_lora_adapter(request: Request) -> Response:
        return service.unload(await reader.read(request, UnloadAdapterRequest))


_NOT_READY: dict[EngineState, str] = {
    "starting": "the engine process loads the model",
    "ready": "the engine process is silent, and is replaced if it stays so",
    "restarting": "the engine process ended, and another one starts; requests wait",
    "paused": "the engine process ended again and again, and is started next after a pause",
    "dead": "the engine process could not be started; see the log",
}


def _add_state_routes(app: FastAPI, client: AsyncEngineClient) -> None:
    supervisor = client.supervisor

    @app.get("/health")
    async def health() -> Response:
        # Of this process: the engine's is started again by itself, and not sooner by a probe.
        return json_response({"status": supervisor.state, **_programs_left(supervisor)})

    @app.get("/ready")
    async def ready() -> Response:
        body: dict[str, Any] = {"status": supervisor.state, **_programs_left(supervisor)}
        heartbeat = supervisor.heartbeat
        if heartbeat is not None:
            body["num_running"] = heartbeat.num_running
            body["num_waiting"] = heartbeat.num_waiting
        if supervisor.is_healthy:
            return json_response(body)
        body["reason"] = _NOT_READY[supervisor.state]
        response = json_response(body, 503)
        response.headers["Retry-After"] = str(max(1, round(supervisor.retry_after_s or 1.0)))
        return response

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})


def _add_media_route(app: FastAPI, client: AsyncEngineClient, config: ServerConfig) -> None:
    cache = client.input_processor.cache

    @app.get("/internal/media", include_in_schema=False)
    async def media() -> Response:
        if len(config.api_keys) > 1:
            raise HTTPException(403)
        # In a thread: the cache's lock may be held by another one.
        hashes = [] if cache is None else await asyncio.to_thread(cache.list_hashes)
        return json_response({"object": "list", "media_hashes": hashes})


def _make_tracer(client: AsyncEngineClient, endpoint: str | None) -> Any:
    """Return the observer that traces requests; None if they are not traced."""
    if endpoint is None:
        return None
    try:
        # Imported here: it is part of an extra.
        from mmjax.server.traces import RequestTracer, make_provider
    except ImportError as error:
        raise ConfigError(
            f"`otlp_traces_endpoint` is {endpoint!r}, but OpenTelemetry is not installed; run "
            "pip install 'mmjax[otel]'"
        ) from error
    model_name = client.input_processor.model_config.public_name
    tracer = RequestTracer(make_provider(endpoint), model_name)
    client.observe(tracer)
    return tracer


def _add_metrics_route(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/metrics", include_in_schema=False)
    async def serve_metrics() -> Response:
        return Response(await metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _programs_left(supervisor: EngineLink) -> dict[str, int]:
    """Return how many programs are compiled while others serve; nothing before the first do."""
    latest = supervisor.heartbeat or supervisor.ready
    return {} if latest is None else {"num_programs_left": latest.num_programs_left}


def _model_card(client: AsyncEngineClient, chat: ChatParser) -> ModelCard:
    model_config = client.input_processor.model_config
    limits = dict(client.input_processor.allowed_mm_limits)
    return ModelCard(
        id=model_config.public_name,
        created=int(time.time()),
        root=model_config.public_name,
        max_model_len=model_config.max_model_len,
        capabilities={
            "input_modalities": ["text", *limits],
            "output_modalities": ["text"],
            "limit_mm_per_prompt": limits,
            "chat_template_content_format": chat.template.content_format,
        },
    )
