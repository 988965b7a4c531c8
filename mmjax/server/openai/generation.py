"""The one way of chats and text completions: checks, requests to the engine, the answer."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mmjax import __version__
from mmjax.config.engine_config import ServerConfig
from mmjax.errors import ModelNotFoundError, RequestValueError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.engine_client.request_stream import RequestStream
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.requests.prompts import PromptDict
from mmjax.frontend.requests.request import GenerateRequest, PromptSource
from mmjax.params.sampling_params import SamplingParams
from mmjax.server.openai.continuation import CONTINUATION, age_s, created_at, new_hex
from mmjax.server.openai.errors import JsonResponse
from mmjax.server.openai.protocol import GenerationRequest, StreamOptions
from mmjax.server.openai.request_body import owner_of
from mmjax.server.openai.responses import Answer, ChoiceOptions, RequestMetrics, UsageCounter
from mmjax.server.openai.streaming import (
    EventStream,
    Outputs,
    begin,
    collect,
    media_headers,
    while_connected,
)
from mmjax.server.openai.structure import renamed

T = TypeVar("T")

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
                raise RequestValueError.about(
                    name,
                    "is not accepted from requests; leave it out, or start the server with "
                    "`--trust-request-mm-kwargs`",
                )
        if body.priority and self._client.scheduling_policy != "priority":
            raise RequestValueError.about(
                "priority",
                f"is {body.priority}, but this server serves in the order of arrival; leave it "
                "out, or start the server with `--scheduling-policy priority`",
            )
        for name in ("chat_template", "chat_template_kwargs"):
            given = getattr(body, name, None)
            if given and not (_is_switches(given) or self._config.trust_request_chat_template):
                raise RequestValueError.about(
                    name,
                    "is not accepted from requests; leave it out, or start the server with "
                    "`--trust-request-chat-template`",
                )
        if self.hides_caches and not self._are_media_ids_trusted:
            # A salt per API key: cache hits, or their speed, would reveal others' prompts.
            salt = f"api key {owner_of(request)}"
            body.cache_salt = body.cache_salt or salt

    @property
    def hides_caches(self) -> bool:
        """Whether clients share the caches, of whom none may learn what others have sent."""
        return len(self._config.api_keys) > 1

    def id_domain(self, request: Request) -> str | None:
        """Return the namespace of a request's media ids; None: the global one, for trusted ids."""
        if self._are_media_ids_trusted:
            return None
        return f"{owner_of(request)}/{self.model_name}"

    def _deadline(self, body: GenerationRequest) -> float | None:
        times = [seconds for seconds in (self._config.request_timeout_s, body.timeout) if seconds]
        if not times:
            return None
        # A request that comes too late ends as soon as it is here.
        return time.monotonic() + max(_LEAST_TIMEOUT_S, min(times) - age_s())

    async def submit(
        self,
        request: Request,
        body: GenerationRequest,
        answer_id: str,
        prompts: Sequence[PromptSource],
        params: SamplingParams,
        *,
        continues_prompt: bool = False,
        names: Sequence[str] = (),
    ) -> list[RequestStream]:
        """Add one request for each prompt; if one is refused, abort all.

        Also if the client disconnects meanwhile: RequestCancelledError. `names`: of the fields that
        hold the prompts, for errors, if they have others than chats and completions.
        """
        self._client.capacity.check_size(len(prompts), params.n)
        id_domain, lora_name = self.id_domain(request), self.check_model(body.model)
        deadline = self._deadline(body)
        adding = [
            self._client.add_request(
                GenerateRequest(
                    _engine_id(answer_id, number if len(prompts) > 1 else None),
                    prompt,
                    _with_seed(params, number),
                    stream=bool(body.stream),
                    continues_prompt=continues_prompt,
                    id_domain=id_domain,
                    lora_name=lora_name,
                    priority=body.priority,
                    deadline=deadline,
                    generated_token_ids=_generated_token_ids(number, params),
                )
            )
            for number, prompt in enumerate(prompts)
        ]
        if names:
            adding = [_naming(one, name) for one, name in zip(adding, names, strict=True)]
        added = await while_connected(request, _add_all(adding))
        streams = [item for item in added if isinstance(item, RequestStream)]
        failures = [item for item in added if isinstance(item, BaseException)]
        if failures:
            for stream in streams:
                stream.close()
            raise failures[0]
        return streams

    async def answer(
        self, request: Request, body: GenerationRequest, run: "Run", answer_id: str, kind: str
    ) -> Response:
        """Return the response to a request: the whole answer, or the stream of its chunks."""
        new_answer = partial(
            Answer,
            id=answer_id,
            object=kind,
            created=created_at(),
            model=self.answer_name(body.model),
            system_fingerprint=f"mmjax-{__version__}",
        )
        if body.stream:
            outputs = await begin(request, run.streams, run.shown)
            return self.event_stream(self._chunks(body, run, outputs, new_answer), run.streams)
        usage, found = UsageCounter(), dict[int, RequestOutput]()

        def take(number: int, output: RequestOutput) -> None:
            found[number] = run.show(number, output)
            usage.add(found[number])

        await collect(request, run.streams, take)
        outputs = [found[number] for number in range(len(run.streams))]
        answer = new_answer(
            choices=[one for pair in enumerate(outputs) for one in run.choices(*pair)],
            usage=usage.usage(),
            metrics=self._metrics(body, usage),
            **run.fields(outputs[0]),
        )
        return JsonResponse(answer, headers=media_headers(run.streams))

    async def _chunks(
        self,
        body: GenerationRequest,
        run: "Run",
        outputs: Outputs,
        new_answer: Callable[..., Answer],
    ) -> AsyncGenerator[Answer, None]:
        usage, has_begun = UsageCounter(), False
        options = body.stream_options or StreamOptions()

        def chunk(choices: Sequence[Any], **fields: Any) -> Answer:
            shown = usage.usage() if options.continuous_usage_stats else msgspec.UNSET
            return new_answer(choices=choices, **{"usage": shown, **fields})

        try:
            for choice in run.opening:
                usage.add_prompts(run.streams)
                yield chunk([choice])
            async for number, output in outputs:
                usage.add(output)
                if choices := run.choices(number, output):
                    yield chunk(choices, **({} if has_begun else run.fields(output)))
                    has_begun = True
        finally:
            await outputs.aclose()
        if options.include_usage or body.return_metrics:
            shown = usage.usage() if options.include_usage else msgspec.UNSET
            yield chunk([], usage=shown, metrics=self._metrics(body, usage))

    def _metrics(
        self, body: GenerationRequest, usage: UsageCounter
    ) -> RequestMetrics | msgspec.UnsetType:
        """Return an answer's times, if the request wants them."""
        if not body.return_metrics:
            return msgspec.UNSET
        return usage.metrics(n=body.n, hides_caches=self.hides_caches)

    def event_stream(
        self, events: AsyncGenerator[Any, None], streams: list[RequestStream], **options: Any
    ) -> EventStream:
        """Return the response that streams `events`, and closes `streams` at its end."""
        return EventStream(
            events, streams, keep_alive_s=self._config.sse_keep_alive_interval_s, **options
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Requests that the engine has taken, and how their outputs become an answer."""

    streams: list[RequestStream]
    """One for each prompt."""
    choices: Callable[[int, RequestOutput], list[Any]]
    """Returns the choices of an output of the prompt of that number; of a stream, what it adds."""
    fields: Callable[[RequestOutput], Mapping[str, Any]] = lambda output: {}
    """Returns the answer's further fields; of a stream, its first chunk's."""
    opening: Sequence[Any] = ()
    """Choices that a stream begins with, each in a chunk of its own."""
    show: Callable[[int, RequestOutput], RequestOutput] = lambda number, output: output
    """Returns what is shown of an output."""
    shown: Callable[[Outputs], Outputs] = lambda outputs: outputs
    """Returns what is shown of a stream's outputs."""


def new_ids(prefix: str, body: GenerationRequest) -> tuple[str, str]:
    """Return a new id for the engine, and the answer's, of which the request may say a part."""
    request_id = f"{prefix}-{new_hex()}"
    return request_id, request_id if body.request_id is None else f"{prefix}-{body.request_id}"


def _is_switches(given: Any) -> bool:
    """Return whether these are options that are true or false: none makes a template run long."""
    return isinstance(given, dict) and all(type(value) is bool for value in given.values())


def choice_options(
    body: GenerationRequest, num_top_logprobs: int | None, tokenizer: Any, role: str = "assistant"
) -> ChoiceOptions:
    """Return what a request wants in each choice."""
    return ChoiceOptions(
        num_top_logprobs or 0,
        bool(body.return_token_ids),
        bool(body.return_tokens_as_token_ids),
        role,
        tokenizer,
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


async def _naming(adding: Coroutine[Any, Any, T], name: str) -> T:
    """Await `adding`; name, in errors about its prompt, the field that holds it."""
    with renamed({r"prompt|messages\[0\]": name}):
        return await adding


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
