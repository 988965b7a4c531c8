"""Chat completions: conversations to prompts, outputs to OpenAI's messages."""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mmjax.config.engine_config import ServerConfig
from mmjax.errors import RequestError
from mmjax.frontend.engine_client.client import AsyncEngineClient, PromptSource
from mmjax.frontend.engine_client.request_stream import RequestStream
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.explain import Explanation
from mmjax.frontend.prompt.input_processor import PromptDict
from mmjax.frontend.prompt.request_template import RequestTemplate, TemplateLimits
from mmjax.requests.sampling_params import SamplingParams
from mmjax.server.openai.answer_reader import AnswerReader
from mmjax.server.openai.continuation import new_hex
from mmjax.server.openai.errors import json_response
from mmjax.server.openai.generation import GenerationService, gather, prompt_token_ids, with_extras
from mmjax.server.openai.media_headers import media_headers
from mmjax.server.openai.protocol import ChatCompletionRequest
from mmjax.server.openai.request_templates import TemplateThreads
from mmjax.server.openai.responses import (
    Answer,
    ChatChunkChoice,
    ChatDelta,
    ChoiceOptions,
    UsageCounter,
    chat_choice,
    chat_chunk_choice,
    prompt_logprobs,
)
from mmjax.server.openai.streaming import begin, while_connected
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


class ChatService:
    """Serves /v1/chat/completions, and its /render."""

    def __init__(
        self,
        client: AsyncEngineClient,
        chat: ChatParser,
        config: ServerConfig,
        generation: GenerationService,
    ) -> None:
        self._client = client
        self._chat_parser = chat
        self._config = config
        self._generation = generation
        self._template_threads = TemplateThreads()
        self._template_limits = TemplateLimits(
            timeout_s=config.chat_template_render_timeout_s,
            max_chars=_RENDERED_CHARS_FACTOR * client.input_processor.max_prompt_chars,
        )

    def close(self) -> None:
        """End the threads."""
        self._template_threads.close()

    async def chat(self, request: Request, body: ChatCompletionRequest) -> Response:
        """Serve /v1/chat/completions."""
        request_id = f"chatcmpl-{new_hex()}"
        answer_id = request_id if body.request_id is None else f"chatcmpl-{body.request_id}"
        new_answer = self._generation.answer_factory(
            body, answer_id, "chat.completion", bool(body.stream)
        )
        with errors_of_messages():
            run = await self.open_chat(request, body, request_id)
            if body.stream:
                chunks = await begin(request, run.streams)
                events = self._chat_events(body, chunks, new_answer, run)
                return self._generation.event_stream(events, run.streams)
            outputs, usage = await gather(request, run.streams)
        answer = new_answer(
            choices=[
                chat_choice(item, run.reader.read(item), run.options) for item in outputs[0].outputs
            ],
            usage=usage.usage(),
            prompt_token_ids=prompt_token_ids(body, outputs[0]),
            metrics=self._generation.metrics(body, usage),
            prompt_logprobs=prompt_logprobs(outputs[0]),
        )
        return json_response(answer, headers=media_headers(run.streams))

    async def open_chat(
        self, request: Request, body: ChatCompletionRequest, request_id: str
    ) -> ChatRun:
        """Check a chat and give it to the engine; RequestError if it is refused."""
        self._generation.check(request, body)
        tools = self._tool_use(body)
        params = body.sampling_params(self._generation.default_params)
        if tools is not None:
            params = tools.sampling_params(params)
        prompt = await self._prompt_source(request, body)
        with errors_of_format(body.response_format is not None):
            streams = await self._generation.submit(
                request, body, request_id, [prompt], params, continues_prompt=False
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
                self._client.input_processor.tokenizer,
            ),
        )

    async def render(self, request: Request, body: ChatCompletionRequest) -> Response:
        """Serve its /render: describe the processed prompt, without running the model."""
        explanation = await self.explain_chat(request, body)
        if self._generation.hides_caches:
            explanation = explanation.without_cache_states()
        head = {"object": "chat.completion.render", "model": self._generation.model_name}
        return json_response({**head, **explanation.to_dict()})

    async def explain_chat(
        self, request: Request, body: ChatCompletionRequest, *, is_bounded: bool = True
    ) -> Explanation:
        """Process a chat's prompt; without `is_bounded`, also one too long for the model."""
        self._generation.check(request, body)
        self._tool_use(body)
        with errors_of_messages():
            explaining = self._client.explain(
                await self._prompt_source(request, body),
                id_domain=self._generation.id_domain(request),
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
            for stream in run.streams:
                usage.add(stream.request.to_output())
            for index in range(body.n):
                delta = ChatDelta(role=run.options.role, content="")
                yield new_answer(
                    choices=[ChatChunkChoice(index=index, delta=delta)],
                    usage=usage.usage() if is_usage_continuous else msgspec.UNSET,
                )
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
                        else prompt_token_ids(body, output),
                    )
                    is_begun = True
        finally:
            await outputs.aclose()
        for answer in self._generation.closing(body, usage, new_answer):
            yield answer

    def _tool_use(self, body: ChatCompletionRequest) -> ToolUse | None:
        return plan_tool_use(
            body.tools,
            body.tool_choice,
            is_parallel=body.parallel_tool_calls is not False,
            config=self._config,
            template=self._chat_parser.template,
        )

    async def _prompt_source(self, request: Request, body: ChatCompletionRequest) -> PromptSource:
        """Return what makes the prompt; with a template of the request's own, the prompt."""
        if body.chat_template is None:
            return partial(self._chat_prompt, body, None)
        template = RequestTemplate(
            body.chat_template, self._chat_parser.template.tokenizer, self._template_limits
        )
        rendering = self._template_threads.run(partial(self._chat_prompt, body, template))
        return await while_connected(request, rendering)

    def _chat_prompt(
        self, body: ChatCompletionRequest, template: ChatTemplate | None
    ) -> PromptDict:
        """Render the template and decode the images, outside of the event loop."""
        prompt = self._chat_parser.parse(
            [message.model_dump(exclude_none=True) for message in body.messages],
            template=template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tools,
            template_kwargs=_template_options(body, template or self._chat_parser.template),
            add_special_tokens=body.add_special_tokens,
            media_io_kwargs=body.media_io_kwargs,
        )
        return with_extras(prompt, body)


def _echo_of(body: ChatCompletionRequest) -> str:
    """Return the text that the answer continues, if it is to come before it."""
    last = body.messages[-1] if body.messages else None
    if not body.echo or last is None or last.role != "assistant":
        return ""
    if isinstance(last.content, str):
        return last.content
    parts = last.content or []
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in parts)


def _template_options(body: ChatCompletionRequest, template: ChatTemplate) -> Mapping[str, Any]:
    """Return the template's own options; one that asks for the effort of reasoning gets it."""
    options = body.chat_template_kwargs or {}
    if body.reasoning_effort is None or "reasoning_effort" not in template.variables:
        return options
    return {"reasoning_effort": body.reasoning_effort, **options}


def _role_of(body: ChatCompletionRequest, config: ServerConfig) -> str:
    """Return the role of the answer: the last message's, if it goes on with that."""
    is_new = body.add_generation_prompt or not body.messages
    return config.response_role if is_new else body.messages[-1].role


@contextmanager
def errors_of_messages() -> Iterator[None]:
    """Rename the field of errors from the prompt to `messages`."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt" or (error.param or "").startswith("multi_modal_"):
            error.param = "messages"
        raise
