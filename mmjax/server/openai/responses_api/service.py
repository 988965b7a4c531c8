"""/v1/responses: a chat whose conversation the server may keep.

Responses that are kept in memory, for a while: to be read again, and to be gone on from.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mmjax.config.engine_config import ServerConfig
from mmjax.errors import (
    RequestCancelledError,
    RequestError,
    RequestValueError,
    ResponseNotFoundError,
)
from mmjax.server.openai.chat_completions import ChatRun, ChatService
from mmjax.server.openai.continuation import created_at, new_hex
from mmjax.server.openai.errors import JsonResponse
from mmjax.server.openai.generation import GenerationService
from mmjax.server.openai.protocol import ChatCompletionRequest, shared_fields
from mmjax.server.openai.request_body import ModelT, owner_of, validated
from mmjax.server.openai.responses import Event
from mmjax.server.openai.responses_api.conversation import (
    Conversation,
    Message,
    to_chat_format,
    to_chat_tool_choice,
    to_chat_tools,
)
from mmjax.server.openai.responses_api.protocol import (
    ItemsQuery,
    ResponseQuery,
    ResponsesRequest,
)
from mmjax.server.openai.responses_api.response import (
    FunctionCallItem,
    MessageItem,
    ResponseBuilder,
    ResponseObject,
)
from mmjax.server.openai.streaming import NAMED_EVENTS, Outputs, begin, collect, media_headers
from mmjax.server.openai.structure import renamed

_BYTES_PER_OBJECT = 64


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """A response with its conversation, which is a follow-up's history."""

    response: ResponseObject
    owner: str
    """Digest of the API key that made it; nobody else finds it."""
    input_items: list[dict[str, Any]]
    messages: list[Message]
    """All up to this response, its answer included once it is there; without `instructions`."""
    cancel: Callable[[], None] | None = None
    """Breaks a running response off."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is there, and ended by itself."""
        return self.response.status in ("completed", "incomplete")

    @property
    def num_bytes(self) -> int:
        """Return about the size of what is kept."""
        return _size_of([self.messages, self.input_items, self.response.instructions])


class ResponseStore:
    """The latest responses, bounded in number and in size."""

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._max_responses > 0

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, or what has become of it; drop the oldest ones for it."""
        response_id = stored.response.id
        self._drop(response_id)
        size = stored.num_bytes
        if size > self._max_bytes:
            return
        self._stored[response_id], self._sizes[response_id] = stored, size
        self._num_bytes += size
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, response_id: str, owner: str, *, param: str | None = None) -> StoredResponse:
        """Return a response; ResponseNotFoundError if it is not kept, or is another's."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise ResponseNotFoundError(
                "there is no such response (any more): it was made with `store`: false, deleted, "
                "or dropped for newer ones",
                param=param,
            )
        self._stored.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, owner: str) -> None:
        """Forget a response, and break it off if it is running."""
        stored = self.get(response_id, owner)
        self._drop(response_id)
        if stored.cancel is not None:
            stored.cancel()

    def holds(self, response_id: str) -> bool:
        """Return whether a response is kept."""
        return response_id in self._stored

    def _drop(self, response_id: str) -> None:
        if self._stored.pop(response_id, None) is not None:
            self._num_bytes -= self._sizes.pop(response_id)


def _size_of(value: Any) -> int:
    """Return about the bytes of JSON data in memory."""
    waiting, size = [value], 0
    while waiting:
        one = waiting.pop()
        size += _BYTES_PER_OBJECT
        if isinstance(one, str):
            size += len(one) if one.isascii() else 4 * len(one)
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
    return size


_OWN_FIELDS = frozenset({"stream_options"})
"""Fields that chat has, too, and that do not go to it as they are."""

_FIELD_OF_CHAT_FIELD: Mapping[str, str] = {
    "max_completion_tokens": "max_output_tokens",
    r"response_format\.json_schema|response_format": "text.format",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
}


class ResponsesService:
    """Serves /v1/responses and what is below it."""

    def __init__(
        self, chats: ChatService, generation: GenerationService, config: ServerConfig
    ) -> None:
        self._chats = chats
        self._generation = generation
        self._store = ResponseStore(
            max_responses=config.max_num_stored_responses,
            max_bytes=config.max_stored_responses_bytes,
        )

    async def responses(self, request: Request, body: ResponsesRequest) -> Response:
        """Serve POST /v1/responses."""
        conversation = self._conversation(request, body)
        with renamed(_FIELD_OF_CHAT_FIELD), conversation.naming_items():
            chat = await asyncio.to_thread(_to_chat, body, conversation)
            run = await self._chats.open_chat(request, chat, f"resp_{new_hex()}")
            builder = ResponseBuilder(self._new_response(body, run), run.options, run.reader)
            stored = _new_stored(request, body, conversation, builder.response)
            if not body.stream:
                await collect(request, run.streams, lambda _, output: list(builder.take(output)))
                self._keep(body, stored, builder)
                return JsonResponse(builder.response, headers=media_headers(run.streams))
            outputs = await begin(request, run.streams)
        if body.store is not False:
            stored.cancel = run.cancel
            self._store.put(stored)
        events = self._events(body, builder, outputs, stored)
        return self._generation.event_stream(events, run.streams, framing=NAMED_EVENTS)

    async def input_tokens(self, request: Request, body: ResponsesRequest) -> Response:
        """Serve POST /v1/responses/input_tokens."""
        conversation = self._conversation(request, body)
        with renamed(_FIELD_OF_CHAT_FIELD), conversation.naming_items():
            chat = await asyncio.to_thread(_to_chat, body, conversation)
            explained = await self._chats.explain_chat(request, chat, is_bounded=False)
        num_tokens = len(explained.prompt_token_ids)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": num_tokens})

    def response(self, request: Request, response_id: str) -> Response:
        """Serve GET /v1/responses/{id}."""
        _read_query(request, ResponseQuery)
        return JsonResponse(self._store.get(response_id, owner_of(request)).response)

    def input_items(self, request: Request, response_id: str) -> Response:
        """Serve GET /v1/responses/{id}/input_items."""
        query = _read_query(request, ItemsQuery)
        items = self._store.get(response_id, owner_of(request)).input_items
        page = query.page_of(((item["id"], item) for item in items), "is no item of this response")
        return JsonResponse(page)

    def delete(self, request: Request, response_id: str) -> Response:
        """Serve DELETE /v1/responses/{id}."""
        self._store.delete(response_id, owner_of(request))
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    def cancel(self, request: Request, response_id: str) -> Response:
        """Serve POST /v1/responses/{id}/cancel: break a stream off."""
        stored = self._store.get(response_id, owner_of(request))
        if stored.cancel is None:
            raise RequestValueError(
                f"this response is {stored.response.status}, and cannot be cancelled any more"
            )
        stored.cancel()
        return JsonResponse(msgspec.structs.replace(stored.response, status="cancelled"))

    # ---- one response ---------------------------------------------------------------------------

    def _conversation(self, request: Request, body: ResponsesRequest) -> Conversation:
        body.check_supported()
        history: list[Message] = []
        if body.previous_response_id is not None:
            param = "previous_response_id"
            previous = self._store.get(body.previous_response_id, owner_of(request), param=param)
            if not previous.is_complete:
                raise RequestValueError(
                    f"the response that `{param}` names is {previous.response.status}; wait "
                    "for its end, or leave it out",
                    param=param,
                )
            history = previous.messages
        conversation = Conversation(history)
        conversation.add_input(body.input)
        return conversation

    def _new_response(self, body: ResponsesRequest, run: ChatRun) -> ResponseObject:
        form = None if body.text is None else body.text.format
        return ResponseObject(
            id=f"resp_{new_hex()}",
            created_at=created_at(),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._generation.answer_name(body.model),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            store=body.store is not False and self._store.is_on,
            temperature=run.params.temperature,
            text={"format": form or {"type": "text"}},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=run.params.top_p,
            user=body.user,
        )

    async def _events(
        self,
        body: ResponsesRequest,
        builder: ResponseBuilder,
        outputs: Outputs,
        stored: StoredResponse,
    ) -> AsyncGenerator[Event, None]:
        try:
            for event in builder.begin():
                yield event
            async for _, output in outputs:
                for event in builder.take(output):
                    yield event
        except RequestCancelledError:
            for event in builder.cancel():
                yield event
        except RequestError as error:
            for event in builder.fail(error):
                yield event
        finally:
            await outputs.aclose()
            if not builder.is_finished:
                # The client has left, and nobody reads these.
                builder.cancel()
            stored.cancel = None
            if self._store.holds(stored.response.id):
                self._keep(body, stored, builder)

    def _keep(
        self, body: ResponsesRequest, stored: StoredResponse, builder: ResponseBuilder
    ) -> None:
        """Keep a response that has ended."""
        if body.store is not False:
            stored.messages.append(_answer_of(builder.response))
            self._store.put(stored)


def _to_chat(body: ResponsesRequest, conversation: Conversation) -> ChatCompletionRequest:
    """Return the chat that a response is; RequestError names chat's fields."""
    messages = conversation.with_instructions(body.instructions)
    fields = shared_fields(body, ChatCompletionRequest, but=_OWN_FIELDS)
    fields |= {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs,
        # Token by token, of which each is then told to be a message's, a call's or a thought's.
        "stream": body.stream or body.wants_logprobs,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "tools": to_chat_tools(body.tools),
        "tool_choice": to_chat_tool_choice(body.tool_choice),
        "response_format": to_chat_format(None if body.text is None else body.text.format),
    }
    return validated(ChatCompletionRequest, fields)


def _new_stored(
    request: Request,
    body: ResponsesRequest,
    conversation: Conversation,
    response: ResponseObject,
) -> StoredResponse:
    given = body.input
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return StoredResponse(
        response=response,
        owner=owner_of(request),
        input_items=[_shown_item(item) for item in items],
        messages=list(conversation.messages),
    )


def _shown_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of the input with an id, and its text as a part."""
    given = {name: value for name, value in item.items() if value is not None}
    shown = {"id": f"msg_{new_hex()}", "type": "message", **given}
    if isinstance(shown.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": shown["content"]}]
    return shown


def _answer_of(response: ResponseObject) -> Message:
    """Return a response as the assistant's message in a follow-up's history."""
    texts = [
        part.text
        for item in response.output
        if isinstance(item, MessageItem)
        for part in item.content
    ]
    calls = [
        {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments},
        }
        for item in response.output
        if isinstance(item, FunctionCallItem)
    ]
    message: Message = {"role": "assistant", "content": "".join(texts) or None}
    return {**message, "tool_calls": calls} if calls else message


def _read_query(request: Request, model: type[ModelT]) -> ModelT:
    """Return a query as a `model`; OpenAI's client writes a list's name as `include[]`."""
    query = request.query_params
    fields: dict[str, Any] = {
        name: value for name, value in query.items() if name.removesuffix("[]") != "include"
    }
    included = [*query.getlist("include"), *query.getlist("include[]")]
    return validated(model, {**fields, **({"include": included} if included else {})})
