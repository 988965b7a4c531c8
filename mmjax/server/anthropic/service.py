"""/v1/messages: Anthropic's API, over chat completions."""

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from mmjax.frontend.prompt.chat import REASONING_FIELDS
from mmjax.server.anthropic.answer import MessageBuilder
from mmjax.server.anthropic.conversation import read_messages, to_chat
from mmjax.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from mmjax.server.openai.chat_completions import ChatService
from mmjax.server.openai.continuation import new_hex
from mmjax.server.openai.errors import JsonResponse
from mmjax.server.openai.generation import GenerationService
from mmjax.server.openai.responses import Event
from mmjax.server.openai.streaming import MESSAGE_EVENTS, Outputs, begin, collect, media_headers
from mmjax.server.openai.structure import renamed

_FIELD_OF_CHAT_FIELD = {
    "stop": "stop_sequences",
    r"response_format\.json_schema|response_format": "output_config.format",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
}
_THINKING_OPTIONS = ("enable_thinking", "thinking")
"""What chat templates call the option that says whether the model reasons."""


class MessagesService:
    """Serves /v1/messages and its count_tokens."""

    def __init__(self, chats: ChatService, generation: GenerationService) -> None:
        self._chats = chats
        self._generation = generation
        template = chats.parser.template
        asked = (one for one in _THINKING_OPTIONS if one in template.variables)
        self._thinking_option = next(asked, None)
        self._keeps_thoughts = not template.message_fields.isdisjoint(REASONING_FIELDS)

    async def messages(self, request: Request, body: MessagesRequest) -> Response:
        """Serve POST /v1/messages."""
        conversation = read_messages(body, keeps_thoughts=self._keeps_thoughts)
        with renamed(_FIELD_OF_CHAT_FIELD), conversation.naming_items():
            chat = await asyncio.to_thread(to_chat, body, conversation, self._thinking_option)
            run = await self._chats.open_chat(request, chat, f"msg_{new_hex()}")
            builder = MessageBuilder(self._generation.answer_name(body.model), run.reader)
            if not body.stream:
                await collect(request, run.streams, lambda _, output: list(builder.take(output)))
                return JsonResponse(builder.message, headers=media_headers(run.streams))
            outputs = await begin(request, run.streams)
        events = _events(builder, outputs)
        return self._generation.event_stream(events, run.streams, framing=MESSAGE_EVENTS)

    async def count_tokens(self, request: Request, body: CountTokensRequest) -> Response:
        """Serve POST /v1/messages/count_tokens."""
        conversation = read_messages(body, keeps_thoughts=self._keeps_thoughts)
        with renamed(_FIELD_OF_CHAT_FIELD), conversation.naming_items():
            chat = await asyncio.to_thread(to_chat, body, conversation, self._thinking_option)
            explained = await self._chats.explain_chat(request, chat, is_bounded=False)
        return JsonResponse({"input_tokens": len(explained.prompt_token_ids)})


async def _events(builder: MessageBuilder, outputs: Outputs) -> AsyncGenerator[Event, None]:
    try:
        async for _, output in outputs:
            for event in builder.take(output):
                yield event
    finally:
        await outputs.aclose()
