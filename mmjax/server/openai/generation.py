"""Chat and text completions: requests to prompts, outputs to OpenAI's responses."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mmjax import __version__
from mmjax.config import SchedulingPolicy, ServerConfig
from mmjax.errors import ModelNotFoundError, RequestError, RequestValueError
from mmjax.frontend.engine_client.client import AsyncEngineClient, PromptSource, RequestStream
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.input_processor import PromptDict
from mmjax.sampling_params import SamplingParams
from mmjax.server.middleware import API_KEY_STATE
from mmjax.server.openai.errors import json_response
from mmjax.server.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from mmjax.server.openai.responses import (
    Answer,
    ChatChunkChoice,
    ChatDelta,
    ChoiceOptions,
    RequestMetrics,
    UsageCounter,
    chat_choice,
    chat_chunk_choice,
    prompt_logprobs,
    text_choice,
)
from mmjax.server.openai.streaming import EventStream, begin, collect, while_connected
from mmjax.server.openai.structure import errors_of_format


class GenerationService:
    """Serves /v1/chat/completions, its /render, and /v1/completions."""

    def __init__(self, client: AsyncEngineClient, chat: ChatParser, config: ServerConfig) -> None:
        self._client = client
        self._chat = chat
        self._config = config
        model_config = client.input_processor.model_config
        self._model_name = model_config.public_name
        self._are_mm_kwargs_trusted = model_config.mm.trust_request_mm_kwargs
        self._are_media_ids_trusted = model_config.mm.trust_media_ids

    # ---- chat -----------------------------------------------------------------------------------

    async def chat(self, request: Request, body: ChatCompletionRequest) -> Response:
        """Serve /v1/chat/completions."""
        self._check(request, body)
        params = body.sampling_params(self._default_params())
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        make_prompt = partial(self._chat_prompt, body)
        new_answer = self._answer_factory(answer_id, "chat.completion", bool(body.stream))
        options = ChoiceOptions(body.top_logprobs or 0, bool(body.return_token_ids))
        with _errors_of_messages(), errors_of_format(body.response_format is not None):
            streams = await self._submit(
                request,
                answer_id,
                [make_prompt],
                params,
                is_stream=bool(body.stream),
                continues_prompt=False,
                id_domain=self._id_domain(request),
                limits=_limits(body, self._config),
            )
            if body.stream:
                chunks = await begin(request, streams)
                events = self._chat_events(body, chunks, new_answer, options)
                return self._event_stream(events, streams)
            outputs, usage = await _gather(request, streams)
        answer = new_answer(
            choices=[chat_choice(item, options) for item in outputs[0].outputs],
            usage=usage.usage(),
            prompt_token_ids=_prompt_token_ids(body, outputs[0]),
            metrics=self._metrics(body, usage),
            prompt_logprobs=prompt_logprobs(outputs[0]),
        )
        return json_response(answer)

    async def render(self, request: Request, body: ChatCompletionRequest) -> Response:
        """Serve its /render: describe the processed prompt, without running the model."""
        self._check(request, body)
        with _errors_of_messages():
            explaining = self._client.explain(
                partial(self._chat_prompt, body), id_domain=self._id_domain(request)
            )
            explanation = await while_connected(request, explaining)
        if self._hides_caches:
            explanation = explanation.without_cache_states()
        head = {"object": "chat.completion.render", "model": self._model_name}
        return json_response({**head, **explanation.to_dict()})

    async def _chat_events(
        self,
        body: ChatCompletionRequest,
        outputs: AsyncGenerator[tuple[int, RequestOutput], None],
        new_answer: Callable[..., Answer],
        options: ChoiceOptions,
    ) -> AsyncGenerator[Answer, None]:
        usage = UsageCounter()
        stream_options = body.stream_options
        is_usage_continuous = bool(stream_options and stream_options.continuous_usage_stats)
        try:
            for index in range(body.n):
                delta = ChatDelta(role="assistant", content="")
                yield new_answer(choices=[ChatChunkChoice(index=index, delta=delta)])
            async for _, output in outputs:
                usage.add(output)
                yield new_answer(
                    choices=[chat_chunk_choice(item, options) for item in output.outputs],
                    usage=usage.usage() if is_usage_continuous else msgspec.UNSET,
                )
        finally:
            await outputs.aclose()
        for answer in self._closing(body, usage, new_answer):
            yield answer

    def _chat_prompt(self, body: ChatCompletionRequest) -> PromptDict:
        """Render the template and decode the images, outside of the event loop."""
        template = None
        if body.chat_template is not None:
            template = self._chat.template.with_source(body.chat_template)
        prompt = self._chat.parse(
            [message.model_dump(exclude_none=True) for message in body.messages],
            template=template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
        return _with_extras(prompt, body)

    # ---- completions ----------------------------------------------------------------------------

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Serve /v1/completions."""
        self._check(request, body)
        params = body.sampling_params(self._default_params())
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        prompts: list[PromptSource] = [_text_prompt(item, body) for item in body.prompts()]
        with errors_of_format(body.response_format is not None):
            streams = await self._submit(
                request,
                answer_id,
                prompts,
                params,
                is_stream=bool(body.stream),
                continues_prompt=True,
                id_domain=self._id_domain(request),
                limits=_limits(body, self._config),
            )
        new_answer = self._answer_factory(answer_id, "text_completion", False)
        options = ChoiceOptions(body.logprobs or 0, bool(body.return_token_ids))
        if body.stream:
            chunks = await begin(request, streams)
            events = self._text_events(body, chunks, len(streams), new_answer, options)
            return self._event_stream(events, streams)
        outputs, usage = await _gather(request, streams)
        choices = [
            text_choice(item, options, index=number * body.n + item.index, offset=0)
            for number, output in enumerate(outputs)
            for item in output.outputs
        ]
        for number, output in enumerate(outputs):
            choices[number * body.n].prompt_logprobs = prompt_logprobs(output)
        metrics = self._metrics(body, usage)
        return json_response(new_answer(choices=choices, usage=usage.usage(), metrics=metrics))

    async def _text_events(
        self,
        body: CompletionRequest,
        outputs: AsyncGenerator[tuple[int, RequestOutput], None],
        num_prompts: int,
        new_answer: Callable[..., Answer],
        options: ChoiceOptions,
    ) -> AsyncGenerator[Answer, None]:
        usage = UsageCounter()
        stream_options = body.stream_options
        is_usage_continuous = bool(stream_options and stream_options.continuous_usage_stats)
        offsets = [0] * (num_prompts * body.n)
        try:
            async for number, output in outputs:
                usage.add(output)
                choices: list[Any] = []
                for item in output.outputs:
                    index = number * body.n + item.index
                    choices.append(text_choice(item, options, index=index, offset=offsets[index]))
                    offsets[index] += len(item.text)
                yield new_answer(
                    choices=choices,
                    usage=usage.usage() if is_usage_continuous else msgspec.UNSET,
                )
        finally:
            await outputs.aclose()
        for answer in self._closing(body, usage, new_answer):
            yield answer

    # ---- both -----------------------------------------------------------------------------------

    def _check(self, request: Request, body: GenerationRequest) -> None:
        if body.model and body.model != self._model_name:
            raise ModelNotFoundError(
                f"this server does not serve `{body.model[:128]}`; it serves `{self._model_name}`",
                param="model",
            )
        body.check_supported()
        if body.mm_processor_kwargs and not self._are_mm_kwargs_trusted:
            raise RequestValueError(
                "`mm_processor_kwargs` is not accepted from requests; leave it out, or start the "
                "server with `--trust-request-mm-kwargs`",
                param="mm_processor_kwargs",
            )
        _check_priority(body, self._client.scheduling_policy)
        has_template = isinstance(body, ChatCompletionRequest) and body.chat_template is not None
        if has_template and not self._config.trust_request_chat_template:
            raise RequestValueError(
                "`chat_template` is not accepted from requests; leave it out, or start the "
                "server with `--trust-request-chat-template`",
                param="chat_template",
            )
        if len(self._config.api_keys) > 1 and not self._are_media_ids_trusted:
            body.cache_salt = body.cache_salt or _default_salt(request)

    @property
    def _hides_caches(self) -> bool:
        # Clients share the caches, and none may learn what others have sent.
        return len(self._config.api_keys) > 1

    def _metrics(
        self, body: GenerationRequest, usage: UsageCounter
    ) -> RequestMetrics | msgspec.UnsetType:
        if not body.return_metrics:
            return msgspec.UNSET
        return usage.metrics(n=body.n, hides_caches=self._hides_caches)

    def _closing(
        self, body: GenerationRequest, usage: UsageCounter, new_answer: Callable[..., Answer]
    ) -> Iterator[Answer]:
        """Yield a stream's last chunk, if the request wants usage or metrics."""
        has_usage = body.stream_options is not None and body.stream_options.include_usage
        if has_usage or body.return_metrics:
            yield new_answer(
                choices=[],
                usage=usage.usage() if has_usage else msgspec.UNSET,
                metrics=self._metrics(body, usage),
            )

    def _id_domain(self, request: Request) -> str | None:
        """Return the namespace of a request's media ids; None: the global one, for trusted ids."""
        if self._are_media_ids_trusted:
            return None
        return f"{getattr(request.state, API_KEY_STATE, '')}/{self._model_name}"

    def _default_params(self) -> SamplingParams:
        return self._client.input_processor.default_sampling_params()

    async def _submit(
        self,
        request: Request,
        answer_id: str,
        prompts: Sequence[PromptSource],
        params: SamplingParams,
        *,
        is_stream: bool,
        continues_prompt: bool,
        id_domain: str | None,
        limits: Mapping[str, Any],
    ) -> list[RequestStream]:
        """Add one request for each prompt; if one is refused, abort all.

        Also if the client disconnects meanwhile: RequestCancelledError.
        """
        self._client.capacity.check_size(len(prompts), params.n)
        adding = [
            self._client.add_request(
                answer_id if len(prompts) == 1 else f"{answer_id}-{number}",
                prompt,
                params,
                stream=is_stream,
                continues_prompt=continues_prompt,
                id_domain=id_domain,
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

    def _event_stream(
        self, events: AsyncGenerator[Answer, None], streams: list[RequestStream]
    ) -> EventStream:
        return EventStream(events, streams, keep_alive_s=self._config.sse_keep_alive_interval_s)

    def _answer_factory(self, answer_id: str, kind: str, is_chunked: bool) -> Callable[..., Answer]:
        return partial(
            Answer,
            id=answer_id,
            object=f"{kind}.chunk" if is_chunked else kind,
            created=int(time.time()),
            model=self._model_name,
            system_fingerprint=f"mmjax-{__version__}",
        )


async def _add_all(
    adding: Sequence[Coroutine[Any, Any, RequestStream]],
) -> list[RequestStream | BaseException]:
    """Return each request's stream or exception; if cancelled, abort all."""
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


def _limits(body: GenerationRequest, config: ServerConfig) -> Mapping[str, Any]:
    """Return the request's priority and timeout."""
    times = [seconds for seconds in (config.request_timeout_s, body.timeout) if seconds]
    return {"priority": body.priority, "timeout_s": min(times, default=0.0)}


async def _gather(
    request: Request, streams: list[RequestStream]
) -> tuple[list[RequestOutput], UsageCounter]:
    """Return the final output of each stream."""
    usage = UsageCounter()
    outputs: dict[int, RequestOutput] = {}

    def take(index: int, output: RequestOutput) -> None:
        usage.add(output)
        outputs[index] = output

    await collect(request, streams, take)
    return [outputs[index] for index in range(len(streams))], usage


def _default_salt(request: Request) -> str:
    """Return a cache salt per API key: cache hits, or their speed, would reveal others' prompts."""
    return f"api key {getattr(request.state, API_KEY_STATE)}"


@contextmanager
def _errors_of_messages() -> Iterator[None]:
    """Rename the field of errors from the prompt to `messages`."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt" or (error.param or "").startswith("multi_modal_"):
            error.param = "messages"
        raise


def _text_prompt(prompt: str | list[int], body: CompletionRequest) -> PromptDict:
    if isinstance(prompt, str):
        made: PromptDict = {"prompt": prompt, "add_special_tokens": body.add_special_tokens}
    else:
        made = {"prompt_token_ids": prompt}
    return _with_extras(made, body)


def _with_extras(prompt: PromptDict, body: GenerationRequest) -> PromptDict:
    if body.mm_processor_kwargs:
        prompt["mm_processor_kwargs"] = body.mm_processor_kwargs
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    return prompt


def _prompt_token_ids(
    body: GenerationRequest, output: RequestOutput
) -> list[int] | msgspec.UnsetType:
    return output.prompt_token_ids if body.return_token_ids else msgspec.UNSET
