"""What chats and text completions share: checks, requests to the engine, the answer's frame."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from mmjax import __version__
from mmjax.config.engine_config import SchedulingPolicy, ServerConfig
from mmjax.errors import ModelNotFoundError, RequestValueError
from mmjax.frontend.engine_client.client import AsyncEngineClient, PromptSource
from mmjax.frontend.engine_client.request_stream import RequestStream
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.prompt.input_processor import PromptDict
from mmjax.requests.sampling_params import SamplingParams
from mmjax.server.middleware import API_KEY_STATE
from mmjax.server.openai.continuation import CONTINUATION, age_s, created_at
from mmjax.server.openai.echo import PromptEcho
from mmjax.server.openai.protocol import GenerationRequest
from mmjax.server.openai.responses import (
    Answer,
    RequestMetrics,
    UsageCounter,
)
from mmjax.server.openai.streaming import EventStream, collect, while_connected

_MAX_LISTED = 8
"""Adapters that an error lists."""

_LEAST_TIMEOUT_S = 1e-3


class GenerationService:
    """Checks requests and gives them to the engine."""

    def __init__(self, client: AsyncEngineClient, config: ServerConfig) -> None:
        self._client = client
        self._config = config
        model_config = client.input_processor.model_config
        self._model_names = model_config.public_names
        self.model_name = model_config.public_name
        self._are_mm_kwargs_trusted = model_config.mm.trust_request_mm_kwargs
        self._are_media_ids_trusted = model_config.mm.trust_media_ids
        self.default_params = client.input_processor.default_sampling_params()
        """What a request has that says nothing of sampling."""

    def check_model(self, name: str | None) -> str | None:
        """Return the adapter that a request names as its model; None: it wants the model itself.

        Raises ModelNotFoundError for a name that is neither's.
        """
        if not name or name in self._model_names:
            return None
        adapters = self._client.adapters.names
        if name in adapters:
            return name
        served = ", ".join(f"`{one}`" for one in (*self._model_names, *adapters[:_MAX_LISTED]))
        raise ModelNotFoundError(
            f"this server does not serve `{name[:128]}`; it serves {served}", param="model"
        )

    def answer_name(self, name: str | None) -> str:
        """Return the name that stands in the answer to a request that has `name`."""
        return self.model_name if not name or name in self._model_names else name

    def check(self, request: Request, body: GenerationRequest) -> None:
        """Refuse, by a RequestError, what this server does not take."""
        self.check_model(body.model)
        body.check_supported()
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if getattr(body, name) and not self._are_mm_kwargs_trusted:
                raise RequestValueError(
                    f"`{name}` is not accepted from requests; leave it out, or start the "
                    "server with `--trust-request-mm-kwargs`",
                    param=name,
                )
        _check_priority(body, self._client.scheduling_policy)
        for name in ("chat_template", "chat_template_kwargs"):
            if getattr(body, name, None) and not self._config.trust_request_chat_template:
                raise RequestValueError(
                    f"`{name}` is not accepted from requests; leave it out, or start the "
                    "server with `--trust-request-chat-template`",
                    param=name,
                )
        if len(self._config.api_keys) > 1 and not self._are_media_ids_trusted:
            body.cache_salt = body.cache_salt or _default_salt(request)

    @property
    def hides_caches(self) -> bool:
        """Whether clients share the caches, of whom none may learn what others have sent."""
        return len(self._config.api_keys) > 1

    def metrics(
        self, body: GenerationRequest, usage: UsageCounter
    ) -> RequestMetrics | msgspec.UnsetType:
        """Return an answer's times, if the request wants them."""
        if not body.return_metrics:
            return msgspec.UNSET
        return usage.metrics(n=body.n, hides_caches=self.hides_caches)

    def closing(
        self, body: GenerationRequest, usage: UsageCounter, new_answer: Callable[..., Answer]
    ) -> Iterator[Answer]:
        """Yield a stream's last chunk, if the request wants usage or metrics."""
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        if has_usage or body.return_metrics:
            yield new_answer(
                choices=[],
                usage=usage.usage() if has_usage else msgspec.UNSET,
                metrics=self.metrics(body, usage),
            )

    def id_domain(self, request: Request) -> str | None:
        """Return the namespace of a request's media ids; None: the global one, for trusted ids."""
        if self._are_media_ids_trusted:
            return None
        return f"{getattr(request.state, API_KEY_STATE, '')}/{self.model_name}"

    def _limits(self, body: GenerationRequest) -> Mapping[str, Any]:
        """Return the request's priority and timeout."""
        times = [seconds for seconds in (self._config.request_timeout_s, body.timeout) if seconds]
        # 0 is no limit; a request that comes too late ends as soon as it is here.
        timeout_s = max(_LEAST_TIMEOUT_S, min(times) - age_s()) if times else 0.0
        return {"priority": body.priority, "timeout_s": timeout_s}

    async def submit(
        self,
        request: Request,
        body: GenerationRequest,
        answer_id: str,
        prompts: Sequence[PromptSource],
        params: SamplingParams,
        *,
        continues_prompt: bool,
    ) -> list[RequestStream]:
        """Add one request for each prompt; if one is refused, abort all.

        Also if the client disconnects meanwhile: RequestCancelledError.
        """
        self._client.capacity.check_size(len(prompts), params.n)
        id_domain, lora_name = self.id_domain(request), self.check_model(body.model)
        limits = self._limits(body)
        adding = [
            self._client.add_request(
                _engine_id(answer_id, number if len(prompts) > 1 else None),
                prompt,
                _with_seed(params, number),
                stream=bool(body.stream),
                continues_prompt=continues_prompt,
                id_domain=id_domain,
                lora_name=lora_name,
                generated_token_ids=_generated_token_ids(number, params),
                **limits,
            )
            for number, prompt in enumerate(prompts)
        ]
        added = await while_connected(request, _add_all(adding))
        streams = [item for item in added if isinstance(item, RequestStream)]
        failures = [item for item in added if isinstance(item, BaseException)]
        if failures:
            for stream in streams:
                stream.close()
            raise failures[0]
        return streams

    def event_stream(
        self, events: AsyncGenerator[Any, None], streams: list[RequestStream], **options: Any
    ) -> EventStream:
        """Return the response that streams `events`, and closes `streams` at its end."""
        return EventStream(
            events, streams, keep_alive_s=self._config.sse_keep_alive_interval_s, **options
        )

    def answer_factory(
        self, body: GenerationRequest, answer_id: str, kind: str, is_chunked: bool
    ) -> Callable[..., Answer]:
        return partial(
            Answer,
            id=answer_id,
            object=f"{kind}.chunk" if is_chunked else kind,
            created=created_at(),
            model=self.answer_name(body.model),
            system_fingerprint=f"mmjax-{__version__}",
        )


def _engine_id(answer_id: str, number: int | None) -> str:
    """Return the engine's id of a prompt's request.

    Each try has its own: the one before may still run, on this server too.
    """
    continuation = CONTINUATION.get()
    attempt = 0 if continuation is None else continuation.attempt
    tried = f"{answer_id}-try-{attempt}" if attempt else answer_id
    return tried if number is None else f"{tried}-{number}"


def _with_seed(params: SamplingParams, number: int) -> SamplingParams:
    """Return the parameters with a seed, if another server may have to sample the same tokens."""
    continuation = CONTINUATION.get()
    if continuation is None or params.seed is not None or params.is_greedy:
        return params
    return msgspec.structs.replace(params, seed=continuation.seed(number))


def _generated_token_ids(number: int, params: SamplingParams) -> list[list[int]]:
    """Return what a client has of the answers to the prompt of that number, from other servers."""
    continuation = CONTINUATION.get()
    # An engine gives a prompt's log-probabilities with the first token that it samples itself.
    if continuation is None or params.prompt_logprobs is not None:
        return []
    return continuation.generated_token_ids(number, params.n)


async def _add_all(
    adding: Sequence[Coroutine[Any, Any, RequestStream]],
) -> list[RequestStream | BaseException]:
    """Return each request's stream or exception; if cancelled, abort all."""
    if len(adding) == 1:
        # Without a task, whose start and end are turns of the event loop.
        try:
            return [await adding[0]]
        except Exception as error:
            return [error]
    tasks = [asyncio.create_task(one) for one in adding]
    try:
        return await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        # Some may have started already.
        for item in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(item, RequestStream):
                item.close()
        raise


def _check_priority(body: GenerationRequest, policy: SchedulingPolicy) -> None:
    if body.priority and policy != "priority":
        raise RequestValueError(
            f"`priority` is {body.priority}, but this server serves in the order of arrival; "
            "leave it out, or start the server with `--scheduling-policy priority`",
            param="priority",
        )


def _default_salt(request: Request) -> str:
    """Return a cache salt per API key: cache hits, or their speed, would reveal others' prompts."""
    return f"api key {getattr(request.state, API_KEY_STATE)}"


async def gather(
    request: Request, streams: list[RequestStream], echo: PromptEcho | None = None
) -> tuple[list[RequestOutput], UsageCounter]:
    """Return the final output of each stream."""
    usage = UsageCounter()
    outputs: dict[int, RequestOutput] = {}

    def take(index: int, output: RequestOutput) -> None:
        output = output if echo is None else echo.apply(index, output)
        usage.add(output)
        outputs[index] = output

    await collect(request, streams, take)
    return [outputs[index] for index in range(len(streams))], usage


def with_extras(prompt: PromptDict, body: GenerationRequest) -> PromptDict:
    """Return the prompt with the fields that chats and completions have for it."""
    if body.mm_processor_kwargs:
        prompt["mm_processor_kwargs"] = body.mm_processor_kwargs
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    if body.truncate_prompt_tokens is not None:
        prompt["truncate_prompt_tokens"] = body.truncate_prompt_tokens
    return prompt


def prompt_token_ids(
    body: GenerationRequest, output: RequestOutput
) -> list[int] | msgspec.UnsetType:
    """Return an answer's `prompt_token_ids`, if the request wants them."""
    return output.prompt_token_ids if body.return_token_ids else msgspec.UNSET
