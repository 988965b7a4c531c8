"""Chat and text completions: requests to prompts, outputs to OpenAI's responses."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.explain import Explanation
from mmjax.frontend.prompt.input_processor import PromptDict
from mmjax.frontend.prompt.request_template import RequestTemplate, TemplateLimits
from mmjax.sampling_params import SamplingParams
from mmjax.server.middleware import API_KEY_STATE
from mmjax.server.openai.answer_reader import AnswerReader
from mmjax.server.openai.continuation import CONTINUATION, created_at, new_hex
from mmjax.server.openai.echo import PromptEcho
from mmjax.server.openai.errors import json_response
from mmjax.server.openai.media_headers import media_headers
from mmjax.server.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from mmjax.server.openai.request_templates import TemplateThreads
from mmjax.server.openai.responses import (
    Answer,
    ChatChunkChoice,
    ChatDelta,
    ChoiceOptions,
    RequestMetrics,
    TextChoice,
    UsageCounter,
    chat_choice,
    chat_chunk_choice,
    prompt_logprobs,
    text_choice,
)
from mmjax.server.openai.streaming import EventStream, begin, collect, while_connected
from mmjax.server.openai.structure import errors_of_format
from mmjax.server.openai.tool_use import ToolUse, plan_tool_use

_RENDERED_CHARS_FACTOR = 2
"""Of a request's own template: what it may write, in texts of the longest prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRun:
    """A chat that the engine has taken."""

    params: SamplingParams
    streams: list[RequestStream]
    reader: AnswerReader
    options: ChoiceOptions

    def cancel(self) -> None:
        """Abort it; whoever reads it gets RequestCancelledError."""
        for stream in self.streams:
            stream.cancel()


_MAX_LISTED = 8
"""Adapters that an error lists."""


class GenerationService:
    """Serves /v1/chat/completions, its /render, and /v1/completions."""

    def __init__(self, client: AsyncEngineClient, chat: ChatParser, config: ServerConfig) -> None:
        self._client = client
        self._chat = chat
        self._config = config
        model_config = client.input_processor.model_config
        self.model_name = model_config.public_name
        self._are_mm_kwargs_trusted = model_config.mm.trust_request_mm_kwargs
        self._are_media_ids_trusted = model_config.mm.trust_media_ids
        self._template_threads = TemplateThreads()
        self._template_limits = TemplateLimits(
            timeout_s=config.chat_template_render_timeout_s,
            max_chars=_RENDERED_CHARS_FACTOR * client.input_processor.max_prompt_chars,
        )

    def close(self) -> None:
        """End the threads."""
        self._template_threads.close()

    # ---- chat -----------------------------------------------------------------------------------

    async def chat(self, request: Request, body: ChatCompletionRequest) -> Response:
        """Serve /v1/chat/completions."""
        request_id = f"chatcmpl-{new_hex()}"
        answer_id = request_id if body.request_id is None else f"chatcmpl-{body.request_id}"
        new_answer = self._answer_factory(body, answer_id, "chat.completion", bool(body.stream))
        with errors_of_messages():
            run = await self.open_chat(request, body, request_id)
            if body.stream:
                chunks = await begin(request, run.streams)
                events = self._chat_events(body, chunks, new_answer, run)
                return self.event_stream(events, run.streams)
            outputs, usage = await gather(request, run.streams)
        answer = new_answer(
            choices=[
                chat_choice(item, run.reader.read(item), run.options) for item in outputs[0].outputs
            ],
            usage=usage.usage(),
            prompt_token_ids=_prompt_token_ids(body, outputs[0]),
            metrics=self._metrics(body, usage),
            prompt_logprobs=prompt_logprobs(outputs[0]),
        )
        return json_response(answer, headers=media_headers(run.streams))

    async def open_chat(
        self, request: Request, body: ChatCompletionRequest, request_id: str
    ) -> ChatRun:
        """Check a chat and give it to the engine; RequestError if it is refused."""
        self._check(request, body)
        tools = self._tool_use(body)
        params = body.sampling_params(self._default_params())
        if tools is not None:
            params = tools.sampling_params(params)
        prompt = await self._prompt_source(request, body)
        with errors_of_format(body.response_format is not None):
            streams = await self._submit(
                request,
                request_id,
                [prompt],
                params,
                is_stream=bool(body.stream),
                continues_prompt=False,
                id_domain=self._id_domain(request),
                lora_name=self.check_model(body.model),
                limits=_limits(body, self._config),
            )
        return ChatRun(
            params=params,
            streams=streams,
            reader=AnswerReader(tools, echo=_echo_of(body)),
            options=ChoiceOptions(
                body.top_logprobs or 0,
                bool(body.return_token_ids),
                bool(body.return_tokens_as_token_ids),
                _role_of(body, self._config),
            ),
        )

    async def render(self, request: Request, body: ChatCompletionRequest) -> Response:
        """Serve its /render: describe the processed prompt, without running the model."""
        explanation = await self.explain_chat(request, body)
        if self._hides_caches:
            explanation = explanation.without_cache_states()
        head = {"object": "chat.completion.render", "model": self.model_name}
        return json_response({**head, **explanation.to_dict()})

    async def explain_chat(
        self, request: Request, body: ChatCompletionRequest, *, is_bounded: bool = True
    ) -> Explanation:
        """Process a chat's prompt; without `is_bounded`, also one too long for the model."""
        self._check(request, body)
        self._tool_use(body)
        with errors_of_messages():
            explaining = self._client.explain(
                await self._prompt_source(request, body),
                id_domain=self._id_domain(request),
                is_bounded=is_bounded,
            )
            return await while_connected(request, explaining)

    async def _chat_events(
        self,
        body: ChatCompletionRequest,
        outputs: AsyncGenerator[tuple[int, RequestOutput], None],
        new_answer: Callable[..., Answer],
        run: ChatRun,
    ) -> AsyncGenerator[Answer, None]:
        usage = UsageCounter()
        stream_options = body.stream_options
        is_usage_continuous = bool(stream_options and stream_options.continuous_usage_stats)
        is_begun = False
        try:
            for index in range(body.n):
                delta = ChatDelta(role=run.options.role, content="")
                yield new_answer(choices=[ChatChunkChoice(index=index, delta=delta)])
            async for _, output in outputs:
                usage.add(output)
                choices = [
                    chat_chunk_choice(item, run.reader.read(item), run.options)
                    for item in output.outputs
                ]
                if run.reader.holds_text_back:
                    choices = [choice for choice in choices if choice.says_something]
                if choices:
                    yield new_answer(
                        choices=choices,
                        usage=usage.usage() if is_usage_continuous else msgspec.UNSET,
                        prompt_token_ids=msgspec.UNSET
                        if is_begun
                        else _prompt_token_ids(body, output),
                    )
                    is_begun = True
        finally:
            await outputs.aclose()
        for answer in self._closing(body, usage, new_answer):
            yield answer

    def _tool_use(self, body: ChatCompletionRequest) -> ToolUse | None:
        return plan_tool_use(
            body.tools,
            body.tool_choice,
            is_parallel=body.parallel_tool_calls is not False,
            config=self._config,
            template=self._chat.template,
        )

    async def _prompt_source(self, request: Request, body: ChatCompletionRequest) -> PromptSource:
        """Return what makes the prompt; with a template of the request's own, the prompt."""
        if body.chat_template is None:
            return partial(self._chat_prompt, body, None)
        template = RequestTemplate(
            body.chat_template, self._chat.template.tokenizer, self._template_limits
        )
        rendering = self._template_threads.run(partial(self._chat_prompt, body, template))
        return await while_connected(request, rendering)

    def _chat_prompt(
        self, body: ChatCompletionRequest, template: ChatTemplate | None
    ) -> PromptDict:
        """Render the template and decode the images, outside of the event loop."""
        prompt = self._chat.parse(
            [message.model_dump(exclude_none=True) for message in body.messages],
            template=template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tools,
            template_kwargs=body.chat_template_kwargs,
            add_special_tokens=body.add_special_tokens,
            media_io_kwargs=body.media_io_kwargs,
        )
        return _with_extras(prompt, body)

    # ---- completions ----------------------------------------------------------------------------

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Serve /v1/completions."""
        self._check(request, body)
        params = body.sampling_params(self._default_params())
        request_id = f"cmpl-{new_hex()}"
        answer_id = request_id if body.request_id is None else f"cmpl-{body.request_id}"
        prompts: list[PromptSource] = [_text_prompt(item, body) for item in body.prompts()]
        echo = await self._prompt_echo(request, body)
        with errors_of_format(body.response_format is not None):
            streams = await self._submit(
                request,
                request_id,
                prompts,
                params,
                is_stream=bool(body.stream),
                continues_prompt=True,
                id_domain=self._id_domain(request),
                lora_name=self.check_model(body.model),
                limits=_limits(body, self._config),
            )
        new_answer = self._answer_factory(body, answer_id, "text_completion", False)
        options = ChoiceOptions(
            body.logprobs or 0,
            bool(body.return_token_ids),
            bool(body.return_tokens_as_token_ids),
        )
        if body.stream:
            chunks = _echoed(await begin(request, streams), echo)
            events = self._text_events(body, chunks, new_answer, options, echo)
            return self.event_stream(events, streams)
        outputs, usage = await gather(request, streams, echo)
        starts = [0 if echo is None else echo.find_start(number) for number in range(len(outputs))]
        choices = [
            text_choice(item, options, index=number * body.n + item.index, offset=starts[number])
            for number, output in enumerate(outputs)
            for item in output.outputs
        ]
        for number, output in enumerate(outputs):
            if body.prompt_logprobs is not None:
                choices[number * body.n].prompt_logprobs = prompt_logprobs(output)
            for choice in choices[number * body.n : (number + 1) * body.n]:
                choice.prompt_token_ids = _prompt_token_ids(body, output)
        metrics = self._metrics(body, usage)
        return json_response(new_answer(choices=choices, usage=usage.usage(), metrics=metrics))

    async def _prompt_echo(self, request: Request, body: CompletionRequest) -> PromptEcho | None:
        if not body.echo:
            return None
        texts = [
            prompt
            if isinstance(prompt, str)
            else await while_connected(request, self._client.detokenize(prompt))
            for prompt in body.prompts()
        ]
        decode = self._client.input_processor.tokenizer.decode
        return PromptEcho(
            texts,
            is_generating=body.max_tokens != 0,
            decode=decode if body.echoes_logprobs else None,
        )

    async def _text_events(
        self,
        body: CompletionRequest,
        outputs: AsyncGenerator[tuple[int, RequestOutput], None],
        new_answer: Callable[..., Answer],
        options: ChoiceOptions,
        echo: PromptEcho | None,
    ) -> AsyncGenerator[Answer, None]:
        usage = UsageCounter()
        stream_options = body.stream_options
        is_usage_continuous = bool(stream_options and stream_options.continuous_usage_stats)
        offsets: dict[int, int] = {}
        try:
            async for number, output in outputs:
                usage.add(output)
                choices: list[TextChoice] = []
                for item in output.outputs:
                    index = number * body.n + item.index
                    is_first = index not in offsets
                    start = 0 if echo is None or not is_first else echo.find_start(number)
                    offset = offsets.setdefault(index, 0)
                    choice = text_choice(item, options, index=index, offset=offset + start)
                    if is_first:
                        choice.prompt_token_ids = _prompt_token_ids(body, output)
                    choices.append(choice)
                    offsets[index] += len(item.text)
                if not choices:
                    continue
                yield new_answer(
                    choices=choices,
                    usage=usage.usage() if is_usage_continuous else msgspec.UNSET,
                )
        finally:
            await outputs.aclose()
        for answer in self._closing(body, usage, new_answer):
            yield answer

    # ---- both -----------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> str | None:
        """Return the adapter that a request names as its model; None: it wants the model itself.

        Raises ModelNotFoundError for a name that is neither's.
        """
        if not name or name == self.model_name:
            return None
        adapters = self._client.adapters.names
        if name in adapters:
            return name
        served = ", ".join(f"`{one}`" for one in (self.model_name, *adapters[:_MAX_LISTED]))
        raise ModelNotFoundError(
            f"this server does not serve `{name[:128]}`; it serves {served}", param="model"
        )

    def _check(self, request: Request, body: GenerationRequest) -> None:
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
        return f"{getattr(request.state, API_KEY_STATE, '')}/{self.model_name}"

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
        lora_name: str | None,
        limits: Mapping[str, Any],
    ) -> list[RequestStream]:
        """Add one request for each prompt; if one is refused, abort all.

        Also if the client disconnects meanwhile: RequestCancelledError.
        """
        self._client.capacity.check_size(len(prompts), params.n)
        adding = [
            self._client.add_request(
                _engine_id(answer_id, number if len(prompts) > 1 else None),
                prompt,
                _with_seed(params, number),
                stream=is_stream,
                continues_prompt=continues_prompt,
                id_domain=id_domain,
                lora_name=lora_name,
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

    def _answer_factory(
        self, body: GenerationRequest, answer_id: str, kind: str, is_chunked: bool
    ) -> Callable[..., Answer]:
        return partial(
            Answer,
            id=answer_id,
            object=f"{kind}.chunk" if is_chunked else kind,
            created=created_at(),
            model=body.model or self.model_name,
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


async def _echoed(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None], echo: PromptEcho | None
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    try:
        async for number, output in outputs:
            yield number, output if echo is None else echo.apply(number, output)
    finally:
        await outputs.aclose()


def _echo_of(body: ChatCompletionRequest) -> str:
    """Return the text that the answer continues, if it is to come before it."""
    last = body.messages[-1] if body.messages else None
    if not body.echo or last is None or last.role != "assistant":
        return ""
    if isinstance(last.content, str):
        return last.content
    parts = last.content or []
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in parts)


def _role_of(body: ChatCompletionRequest, config: ServerConfig) -> str:
    """Return the role of the answer: the last message's, if it goes on with that."""
    is_new = body.add_generation_prompt or not body.messages
    return config.response_role if is_new else body.messages[-1].role


def _default_salt(request: Request) -> str:
    """Return a cache salt per API key: cache hits, or their speed, would reveal others' prompts."""
    return f"api key {getattr(request.state, API_KEY_STATE)}"


@contextmanager
def errors_of_messages() -> Iterator[None]:
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
    if body.truncate_prompt_tokens is not None:
        prompt["truncate_prompt_tokens"] = body.truncate_prompt_tokens
    return prompt


def _prompt_token_ids(
    body: GenerationRequest, output: RequestOutput
) -> list[int] | msgspec.UnsetType:
    return output.prompt_token_ids if body.return_token_ids else msgspec.UNSET
