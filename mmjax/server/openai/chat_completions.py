"""Chat completions: conversations to prompts, outputs to OpenAI's messages."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mmjax.config.engine_config import ServerConfig
from mmjax.errors import CapacityError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.engine_client.request_stream import RequestStream
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.output.reasoning import REASONING_FORMATS, ReasoningFormat
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.explain import Explanation
from mmjax.frontend.prompt.request_template import RequestTemplate, TemplateRenderer
from mmjax.frontend.requests.prompts import PromptDict
from mmjax.frontend.requests.request import PromptSource
from mmjax.params.sampling_params import SamplingParams
from mmjax.server.openai.errors import JsonResponse
from mmjax.server.openai.generation import (
    GenerationService,
    Run,
    choice_options,
    new_ids,
    prompt_token_ids,
    with_extras,
)
from mmjax.server.openai.protocol import ChatCompletionRequest
from mmjax.server.openai.responses import (
    ChatChunkChoice,
    ChatDelta,
    ChoiceOptions,
    chat_choice,
    chat_chunk_choice,
    given,
)
from mmjax.server.openai.streaming import while_connected
from mmjax.server.openai.structure import errors_of_format, errors_of_messages
from mmjax.server.openai.tool_use import (
    AnswerReader,
    ToolUse,
    plan_reasoning,
    plan_tool_use,
    tools_of_prompt,
)

T = TypeVar("T")

MAX_WAITING = 16
"""Requests that wait for the rendering of their own chat templates."""

_RENDERED_CHARS_FACTOR = 2
"""What a request's own template may write, in lengths of the longest prompt's text."""


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
        self.parser = chat
        """Reads conversations by the model's own template."""
        self._config = config
        self._generation = generation
        self._template_threads = TemplateThreads()
        self._template_renderer = TemplateRenderer(
            timeout_s=config.chat_template_render_timeout_s,
            max_chars=_RENDERED_CHARS_FACTOR * client.input_processor.max_prompt_chars,
        )

    def close(self) -> None:
        """End the threads and the processes."""
        self._template_renderer.close()
        self._template_threads.close()

    async def chat_completions(self, request: Request, body: ChatCompletionRequest) -> Response:
        """Serve /v1/chat/completions."""
        request_id, answer_id = new_ids("chatcmpl", body)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        with errors_of_messages():
            chat = await self.open_chat(request, body, request_id)
            reader, options = chat.reader, chat.options

            def choices(_: int, output: RequestOutput) -> list[Any]:
                pieces = [(item, reader.read(item)) for item in output.outputs]
                if not body.stream:
                    return [chat_choice(*pair, options) for pair in pieces]
                chunks = [chat_chunk_choice(*pair, options) for pair in pieces]
                return [one for one in chunks if one.says_something or not reader.holds_text_back]

            def fields(output: RequestOutput) -> dict[str, Any]:
                return {
                    "prompt_token_ids": prompt_token_ids(body, output),
                    "prompt_logprobs": given(output.prompt_logprobs),
                }

            delta = ChatDelta(role=options.role, content="")
            run = Run(
                streams=chat.streams,
                choices=choices,
                fields=fields,
                opening=[ChatChunkChoice(index=index, delta=delta) for index in range(body.n)],
            )
            return await self._generation.answer(request, body, run, answer_id, kind)

    async def open_chat(
        self, request: Request, body: ChatCompletionRequest, request_id: str
    ) -> ChatRun:
        """Check a chat and give it to the engine; RequestError if it is refused."""
        self._generation.check(request, body)
        tools = self._tool_use(body)
        params, form = self._sampling(body, tools)
        prompt = await self.prompt_source(request, body)
        is_enforced = tools is not None and tools.format is None
        with errors_of_format(body.has_schema, has_calls=is_enforced):
            streams = await self._generation.submit(
                *(request, body, request_id, [prompt], params),
                continues_prompt=body.continue_final_message,
            )
        processor, (first, *_) = self._client.input_processor, streams
        reasoning = plan_reasoning(
            form,
            first.request.prompt_token_ids,
            processor.tokenizer,
            processor.special_ids,
            is_shown=body.include_reasoning is not False,
        )
        role = _role_of(body, self._config)
        return ChatRun(
            params=params,
            streams=streams,
            reader=AnswerReader(tools, echo=_echo_of(body), reasoning=reasoning),
            options=choice_options(body, body.top_logprobs, processor.tokenizer, role),
        )

    def _sampling(
        self, body: ChatCompletionRequest, tools: ToolUse | None
    ) -> tuple[SamplingParams, ReasoningFormat | None]:
        """Return the parameters, and the format in which the reasoning is read."""
        params = body.sampling_params(self._generation.default_params)
        if tools is not None:
            is_structured = body.structured_outputs is not None
            params = tools.sampling_params(params, is_structured=is_structured)
        # A structure holds from the first token on: such an answer has no reasoning.
        if self._config.reasoning_parser is None or params.structured_outputs is not None:
            return params, None
        form = REASONING_FORMATS[self._config.reasoning_parser]
        skips = params.skip_special_tokens and not form.keeps_special_tokens
        return msgspec.structs.replace(params, skip_special_tokens=skips), form

    async def render(self, request: Request, body: ChatCompletionRequest) -> Response:
        """Serve its /render: describe the processed prompt, without running the model."""
        explanation = await self.explain_chat(request, body)
        if self._generation.hides_caches:
            explanation = explanation.without_cache_states()
        head = {"object": "chat.completion.render", "model": self._generation.model_name}
        return JsonResponse({**head, **explanation.to_dict()})

    async def explain_chat(
        self, request: Request, body: ChatCompletionRequest, *, is_bounded: bool = True
    ) -> Explanation:
        """Process a chat's prompt; without `is_bounded`, also one too long for the model."""
        self._generation.check(request, body)
        self._tool_use(body)
        with errors_of_messages():
            explaining = self._client.explain(
                await self.prompt_source(request, body),
                id_domain=self._generation.id_domain(request),
                is_bounded=is_bounded,
            )
            return await while_connected(request, explaining)

    def _tool_use(self, body: ChatCompletionRequest) -> ToolUse | None:
        return plan_tool_use(
            body.tools,
            body.tool_choice,
            is_parallel=body.parallel_tool_calls is not False,
            config=self._config,
            template=self.parser.template,
            num_earlier_calls=sum(len(message.tool_calls or ()) for message in body.messages),
        )

    async def prompt_source(self, request: Request, body: ChatCompletionRequest) -> PromptSource:
        """Return what makes the prompt; with a template of the request's own, the prompt."""
        if body.chat_template is None:
            return partial(self._chat_prompt, body, None)
        template = RequestTemplate(
            body.chat_template, self.parser.template.tokenizer, self._template_renderer
        )
        rendering = self._template_threads.run(partial(self._chat_prompt, body, template))
        return await while_connected(request, rendering)

    def _chat_prompt(
        self, body: ChatCompletionRequest, template: ChatTemplate | None
    ) -> PromptDict:
        """Render the template and decode the images, outside of the event loop."""
        prompt = self.parser.parse(
            [message.model_dump(exclude_none=True) for message in body.messages],
            template=template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=tools_of_prompt(body.tools, body.tool_choice),
            template_kwargs=_template_options(body, template or self.parser.template),
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


class TemplateThreads:
    """Threads for conversations that bring their own chat template: they wait for its process.

    Apart from the threads of all other requests, which a slow template would hold. Renders a few
    at a time, and refuses more than a few that wait.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="mmjax-template")
        self._num_waiting = 0

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` in a thread; CapacityError if too many wait."""
        if self._num_waiting >= MAX_WAITING:
            raise CapacityError(
                f"{MAX_WAITING} requests wait for their own chat templates; try again in a moment",
                param="chat_template",
            )
        self._num_waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, job)
        # Also if the caller is cancelled meanwhile: the thread is busy until the job is done.
        future.add_done_callback(self._leave)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Start no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _leave(self, future: "asyncio.Future[T]") -> None:
        self._num_waiting -= 1
        if not future.cancelled():
            # Read here, as nobody else does once the caller has left.
            future.exception()
