"""/tokenize and /detokenize, with vLLM's bodies."""

import asyncio
from typing import Any

import msgspec
from pydantic import Field, StrictBool
from starlette.requests import Request
from starlette.responses import Response

from mmjax.errors import RequestValueError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.server.openai.chat_completions import ChatService
from mmjax.server.openai.errors import JsonResponse
from mmjax.server.openai.generation import GenerationService
from mmjax.server.openai.protocol import (
    MAX_MESSAGES,
    ChatCompletionRequest,
    Label,
    Strict,
    Text,
    TokenIds,
)
from mmjax.server.openai.request_body import validated
from mmjax.server.openai.streaming import while_connected

_FIELDS_OF_CHATS = (
    *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
    *("tools", "mm_processor_kwargs"),
)


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation with its pictures.

    A conversation's fields are chat's, and are checked as chat's.
    """

    model: Label | None = None
    prompt: Text | None = None
    messages: list[Any] | None = Field(None, max_length=MAX_MESSAGES)
    add_special_tokens: StrictBool | None = None
    """By default: of a text yes, of a conversation, whose template writes them, no."""
    return_token_strs: StrictBool | None = False
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template: Text | None = None
    chat_template_kwargs: dict[Label, Any] | None = None
    tools: list[Any] | None = None
    mm_processor_kwargs: dict[Label, Any] | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: Label | None = None
    tokens: TokenIds


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The token ids of a prompt, its pictures' placeholders included."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizationService:
    """Serves /tokenize and /detokenize."""

    def __init__(
        self, client: AsyncEngineClient, chats: ChatService, generation: GenerationService
    ) -> None:
        self._client = client
        self._chats = chats
        self._generation = generation

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        """Serve POST /tokenize."""
        if (body.prompt is None) == (body.messages is None):
            raise RequestValueError(
                "give either `prompt` or `messages`, and not both", param="prompt"
            )
        if body.messages is None:
            token_ids = await self._tokenize_text(request, body)
        else:
            fields = body.model_dump(exclude_none=True, exclude={"return_token_strs", "prompt"})
            # No call is read here, so the server need not know how the model writes one.
            fields |= {"tool_choice": "none"} if body.tools else {}
            chat = await asyncio.to_thread(validated, ChatCompletionRequest, fields)
            explained = await self._chats.explain_chat(request, chat, is_bounded=False)
            token_ids = explained.prompt_token_ids
        input_processor = self._client.input_processor
        answer = TokenizeAnswer(
            count=len(token_ids),
            max_model_len=input_processor.model_config.max_model_len,
            tokens=token_ids,
        )
        if body.return_token_strs:
            answer.token_strs = input_processor.tokenizer.convert_ids_to_tokens(token_ids)
        return JsonResponse(answer)

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        """Serve POST /detokenize."""
        self._generation.check_model(body.model)
        text = await while_connected(request, self._client.detokenize(body.tokens))
        return JsonResponse({"prompt": text})

    async def _tokenize_text(self, request: Request, body: TokenizeRequest) -> list[int]:
        self._generation.check_model(body.model)
        for name in _FIELDS_OF_CHATS:
            if getattr(body, name) is not None:
                raise RequestValueError.about(
                    name, "belongs to `messages`; leave it out, or send messages"
                )
        tokenizing = self._client.tokenize(
            body.prompt or "", add_special_tokens=body.add_special_tokens is not False
        )
        return await while_connected(request, tokenizing)
