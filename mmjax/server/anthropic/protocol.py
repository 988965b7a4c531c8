"""The bodies of POST /v1/messages and /v1/messages/count_tokens, which are Anthropic's.

Fields that a chat completion has, too, are checked by its own model, under the same names.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from mmjax.server.openai.protocol import (
    MAX_MESSAGES,
    Content,
    Label,
    Object,
    Objects,
    ReasoningEffort,
    StopText,
    Strict,
    bounded,
)


class Message(Strict):
    """One message; `conversation.py` reads its blocks."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Thinking(Strict):
    """`thinking`: whether the model reasons, where its chat template has a word in it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    """No effect: `max_tokens` bounds an answer with its reasoning."""
    display: Label | None = None


class OutputConfig(Strict):
    """`output_config`."""

    effort: ReasoningEffort | None = None
    format: Object | None = None
    """`{"type": "json_schema", "schema": {...}}`."""


class ToolChoice(Strict):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: StrictBool | None = None


class CountTokensRequest(Strict):
    """POST /v1/messages/count_tokens."""

    model: Label | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    system: Content | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Object | None = None
    """`output_config.format`, as clients wrote it before."""
    # No effect: all prompts are cached, and nothing is taken away from them.
    cache_control: Object | None = None
    context_management: Object | None = None
    # As a chat's, and checked there.
    mm_processor_kwargs: Any = None
    chat_template_kwargs: Any = None


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[StrictInt, bounded("max_tokens")]
    stop_sequences: Annotated[list[StopText], Field(max_length=64, fail_fast=True)] | None = None
    stream: StrictBool | None = False
    # No effect.
    metadata: Object | None = None
    service_tier: Label | None = None
    inference_geo: Label | None = None
    # As a chat's, and checked there.
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    seed: Any = None
    cache_salt: Any = None
    priority: Any = None
    timeout: Any = None
