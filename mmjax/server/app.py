"""The FastAPI application: routes and middleware."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

from fastapi import FastAPI, Request
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
from mmjax.frontend.prompt.pooling import find_task
from mmjax.params.pooling_params import PoolingParams
from mmjax.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from mmjax.server.anthropic.service import MessagesService
from mmjax.server.api_schema import describe, error_responses, stream_responses, takes
from mmjax.server.batches.endpoints import Endpoints, Route
from mmjax.server.batches.lines import Url
from mmjax.server.batches.protocol import CreateBatchRequest, UploadFile
from mmjax.server.batches.service import FILES_PATH, BatchService, body_limit
from mmjax.server.batches.store import BatchStore
from mmjax.server.batches.worker import BatchWorker
from mmjax.server.control import (
    AdapterService,
    ControlService,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
)
from mmjax.server.metrics import CONTENT_TYPE, Metrics
from mmjax.server.middleware import (
    above_headers,
    key_digests,
    limit_body,
    log_access,
    refuse,
    set_request_id,
    without_key,
    without_room,
)
from mmjax.server.openai.chat_completions import ChatService
from mmjax.server.openai.completions import CompletionService
from mmjax.server.openai.errors import MESSAGES_PATH, JsonResponse, install_error_handlers
from mmjax.server.openai.generation import GenerationService
from mmjax.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from mmjax.server.openai.request_body import ModelT, RequestReader
from mmjax.server.openai.responses import ModelCard, ModelList
from mmjax.server.openai.responses_api.protocol import ResponsesRequest
from mmjax.server.openai.responses_api.service import ResponsesService
from mmjax.server.openai.tokenization import (
    DetokenizeRequest,
    TokenizationService,
    TokenizeRequest,
)
from mmjax.server.openai.transcripts.protocol import TranscriptionRequest, TranslationRequest
from mmjax.server.openai.transcripts.service import TranscriptService
from mmjax.server.openai.vectors.protocol import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from mmjax.server.openai.vectors.service import VectorService
from mmjax.server.pages import PAGE_FILES, api_page, serve_page
from mmjax.server.request_log import RequestLog

_BODIES: tuple[type[BaseModel], ...] = (
    *(ChatCompletionRequest, CompletionRequest, ResponsesRequest),
    *(MessagesRequest, CountTokensRequest),
    *(TranscriptionRequest, TranslationRequest),
    *(CreateBatchRequest, UploadFile),
    *(EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest),
    *(TokenizeRequest, DetokenizeRequest, LoadAdapterRequest, UnloadAdapterRequest),
    UpdateWeightsRequest,
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
        works = [metrics.watch_loop(), *([] if batches is None else [batches.work()])]
        try:
            async with _running(works):
                yield
        finally:
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
    app.state.request_reader, app.state.model_name = reader, generation.model_name
    install_error_handlers(app)
    posts = _Posts(app, reader)
    _add_generation_routes(posts, client, chats, generation)
    _add_responses_routes(app, posts, ResponsesService(chats, generation, config))
    _add_audio_routes(posts, TranscriptService(client, generation, reader))
    _add_vector_routes(posts, VectorService(client, chats, generation))
    _add_token_routes(posts, TokenizationService(client, chats, generation))
    batches = _add_batch_routes(app, reader, config, Endpoints(client, reader, posts.batched))
    describe(app, _BODIES)
    _add_model_routes(app, client, _model_card(client, chat))
    if lora is not None and lora.allow_runtime_lora_updating and lora.lora_dir is not None:
        _add_adapter_routes(posts, AdapterService(client, lora.lora_dir))
    if config.allow_engine_control:
        _add_control_routes(app, reader, ControlService(client, config.weights_dir))
    _add_state_routes(app, client)
    _add_operators_routes(app, client, config, metrics)
    app.add_middleware(refuse, refusal=without_room(client.capacity.check_room, posts.paths))
    _add_middleware(app, config, metrics, tracer)
    return app


@asynccontextmanager
async def _running(works: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run tasks that have no end, until the block ends."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _add_middleware(app: FastAPI, config: ServerConfig, metrics: Metrics, tracer: Any) -> None:
    # The last one added is outermost: the access log, ids, traces, what protects.
    add_protection(app, config)
    if tracer is not None:
        app.add_middleware(tracer.middleware)
    app.add_middleware(set_request_id)
    app.add_middleware(
        log_access,
        count=metrics.count_response,
        quiet_paths=frozenset(config.disable_access_log_for_endpoints),
    )


def add_protection(app: FastAPI, config: ServerConfig) -> None:
    """Add the limits of bodies and headers, API keys, and the origins that may call."""
    # The last one added is outermost: the headers' number, CORS, keys, the body's size.
    by_path = {} if config.batch_dir is None else {FILES_PATH: body_limit(config)}
    app.add_middleware(limit_body, max_bytes=config.max_request_bytes, by_path=by_path)
    if config.api_keys:
        app.add_middleware(refuse, refusal=without_key(config.api_keys))
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["DELETE", "GET", "POST"],
            # Of an origin that may call: OpenAI's client for browsers sends ten of its own.
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    many = above_headers(config.h11_max_header_count, config.h11_max_incomplete_event_size)
    app.add_middleware(refuse, refusal=many)


@dataclass(frozen=True, slots=True)
class _Posts:
    """Adds routes that take a body, each named as the method that serves it.

    Bodies are read by `reader`: FastAPI would decode and validate them without limits.
    """

    app: FastAPI
    reader: RequestReader
    paths: set[str] = field(default_factory=set)
    batched: dict[str, Route] = field(default_factory=dict)
    """Those that the lines of a batch may name."""

    def add(
        self,
        path: str,
        model: type[ModelT],
        serve: Callable[[Request, ModelT], Coroutine[Any, Any, Response]],
        *,
        may_stream: bool = False,
    ) -> None:
        async def endpoint(request: Request) -> Response:
            return await serve(request, await self.reader.read(request, model))

        self.paths.add(path)
        if path in get_args(Url):
            self.batched[path] = Route(model, serve)
        self.app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            name=getattr(serve, "__name__", None),
            openapi_extra=takes(model),
            responses=stream_responses() if may_stream else None,
        )

    def add_form(
        self,
        path: str,
        model: type[BaseModel],
        serve: Callable[[Request], Coroutine[Any, Any, Response]],
    ) -> None:
        """Add a route that reads a form, with a `file`, itself; it may stream."""
        self.paths.add(path)
        self.app.add_api_route(
            path,
            serve,
            methods=["POST"],
            openapi_extra=takes(model, "multipart/form-data"),
            responses=stream_responses(),
        )


def _add_generation_routes(
    posts: _Posts, client: AsyncEngineClient, chats: ChatService, generation: GenerationService
) -> None:
    chat, texts = ChatCompletionRequest, CompletionService(client, generation)
    posts.add("/v1/chat/completions", chat, chats.chat_completions, may_stream=True)
    posts.add("/v1/chat/completions/render", chat, chats.render)
    posts.add("/v1/completions", CompletionRequest, texts.completions, may_stream=True)
    messages = MessagesService(chats, generation)
    posts.add(MESSAGES_PATH, MessagesRequest, messages.messages, may_stream=True)
    posts.add(f"{MESSAGES_PATH}/count_tokens", CountTokensRequest, messages.count_tokens)


def _add_responses_routes(app: FastAPI, posts: _Posts, service: ResponsesService) -> None:
    def add(method: str, path: str, serve: Callable[[Request, str], Response]) -> None:
        async def endpoint(request: Request, response_id: str) -> Response:
            return serve(request, response_id)

        app.add_api_route(path, endpoint, methods=[method], name=serve.__name__)

    path = "/v1/responses"
    posts.add(path, ResponsesRequest, service.responses, may_stream=True)
    posts.add(f"{path}/input_tokens", ResponsesRequest, service.input_tokens)
    add("GET", f"{path}/{{response_id}}", service.response)
    add("DELETE", f"{path}/{{response_id}}", service.delete)
    add("GET", f"{path}/{{response_id}}/input_items", service.input_items)
    add("POST", f"{path}/{{response_id}}/cancel", service.cancel)


def _add_audio_routes(posts: _Posts, service: TranscriptService) -> None:
    posts.add_form("/v1/audio/transcriptions", TranscriptionRequest, service.transcriptions)
    posts.add_form("/v1/audio/translations", TranslationRequest, service.translations)


def _add_vector_routes(posts: _Posts, service: VectorService) -> None:
    posts.add("/v1/embeddings", EmbeddingRequest, service.embeddings)
    posts.add("/pooling", PoolingRequest, service.pooling)
    for start in ("", "/v1", "/v2"):
        posts.add(f"{start}/rerank", RerankRequest, service.rerank)
    for start in ("", "/v1"):
        posts.add(f"{start}/score", ScoreRequest, service.score)


def _add_token_routes(posts: _Posts, service: TokenizationService) -> None:
    posts.add("/tokenize", TokenizeRequest, service.tokenize)
    posts.add("/detokenize", DetokenizeRequest, service.detokenize)


def _add_batch_routes(
    app: FastAPI, reader: RequestReader, config: ServerConfig, endpoints: Endpoints
) -> BatchService | None:
    """Add files and batches; None without a directory for them."""
    # For whoever has a file of requests, and no client.
    app.state.endpoints = endpoints
    if config.batch_dir is None:
        return None
    owners = key_digests(config.api_keys) or [""]
    store = BatchStore(config.batch_dir, config.max_batch_dir_bytes)
    worker = BatchWorker(store, endpoints, owners, max_line_bytes=config.max_request_bytes)
    service = BatchService(store, worker, reader, config)
    # Not among the paths that are refused while there is no room for a request.
    posts = _Posts(app, reader)
    posts.add_form(FILES_PATH, UploadFile, service.upload_file)
    posts.add("/v1/batches", CreateBatchRequest, service.create_batch)
    service.add_to(app)
    return service


def _add_model_routes(app: FastAPI, client: AsyncEngineClient, card: ModelCard) -> None:
    names = client.input_processor.model_config.public_names

    def cards() -> list[ModelCard]:
        adapters = client.adapters.names
        own = (replace(card, id=one) for one in names)
        return [*own, *(replace(card, id=one, root=one, parent=card.id) for one in adapters)]

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse(ModelList(data=cards()))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        found = next((one for one in cards() if one.id == name), None)
        if found is None:
            raise ModelNotFoundError(
                f"this server does not serve `{name[:128]}`; it serves `{card.id}`", param="model"
            )
        return JsonResponse(found)


def _add_adapter_routes(posts: _Posts, service: AdapterService) -> None:
    posts.add("/v1/load_lora_adapter", LoadAdapterRequest, service.load_lora_adapter)
    posts.add("/v1/unload_lora_adapter", UnloadAdapterRequest, service.unload_lora_adapter)


def _add_control_routes(app: FastAPI, reader: RequestReader, service: ControlService) -> None:
    # Not among the paths that are refused while there is no room for a request.
    _Posts(app, reader).add("/update_weights", UpdateWeightsRequest, service.update_weights)
    service.add_to(app)


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
        return JsonResponse({"status": supervisor.state, **_programs_left(supervisor)})

    # SageMaker's and RunPod's probes, which send requests to a server as soon as it is 200.
    @app.post("/ping")
    @app.get("/ping")
    @app.get("/ready")
    async def ready() -> Response:
        body: dict[str, Any] = {"status": supervisor.state, **_programs_left(supervisor)}
        heartbeat = supervisor.heartbeat
        if heartbeat is not None:
            body["num_running"] = heartbeat.num_running
            body["num_waiting"] = heartbeat.num_waiting
        if client.is_healthy:
            return JsonResponse(body)
        body["reason"] = client.control.weights_error or _NOT_READY[supervisor.state]
        response = JsonResponse(body, 503)
        response.headers["Retry-After"] = str(max(1, round(supervisor.retry_after_s or 1.0)))
        return response

    @app.get("/load")
    async def load() -> Response:
        return JsonResponse({"server_load": client.num_requests})

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": __version__})


def _add_operators_routes(
    app: FastAPI, client: AsyncEngineClient, config: ServerConfig, metrics: Metrics
) -> None:
    """Add what the schema does not show: pages, metrics, and the hashes of cached media."""
    cache = client.input_processor.cache

    async def docs() -> Response:
        return api_page(app.openapi(), app.root_path)

    async def media() -> Response:
        if len(config.api_keys) > 1:
            raise HTTPException(403)
        # In a thread: the cache's lock may be held by another one.
        hashes = [] if cache is None else await asyncio.to_thread(cache.list_hashes)
        return JsonResponse({"object": "list", "media_hashes": hashes})

    async def serve_metrics() -> Response:
        return Response(await metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    endpoints: dict[str, Callable[..., Any]] = {
        "/internal/media": media,
        "/metrics": serve_metrics,
        **dict.fromkeys(PAGE_FILES, serve_page),
        **({} if config.disable_fastapi_docs else {"/docs": docs}),
    }
    for path, endpoint in endpoints.items():
        app.add_api_route(path, endpoint, include_in_schema=False)


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


def _programs_left(supervisor: EngineLink) -> dict[str, int]:
    """Return how many programs are compiled while others serve; nothing before the first do."""
    latest = supervisor.heartbeat or supervisor.ready
    return {} if latest is None else {"num_programs_left": latest.num_programs_left}


def _model_card(client: AsyncEngineClient, chat: ChatParser) -> ModelCard:
    model_config = client.input_processor.model_config
    pools = model_config.pools
    limits = dict(client.input_processor.info.allowed_mm_limits)
    return ModelCard(
        id=model_config.public_name,
        created=int(time.time()),
        root=model_config.public_name,
        max_model_len=model_config.max_model_len,
        capabilities={
            "input_modalities": ["text", *limits],
            **({"pooling_task": find_task(PoolingParams(), model_config)} if pools else {}),
            "output_modalities": ["embeddings" if pools else "text"],
            "limit_mm_per_prompt": limits,
            "chat_template_content_format": chat.template.content_format,
            "tasks": dict(client.input_processor.info.get_tasks()),
        },
    )
