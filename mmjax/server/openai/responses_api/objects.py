"""OpenAI's response object and its items."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mmjax.server.openai.responses import TokenLogprob, UsageCounter

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class MessageItem(msgspec.Struct, kw_only=True):
    """What the model says."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []
    parsed: Mapping[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Boxes and labels, where the model's answers hold such; not OpenAI's."""


class FunctionCallItem(msgspec.Struct, kw_only=True):
    """A function that the model calls."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    type: Literal["function_call"] = "function_call"
    status: Status = "in_progress"


OutputItem = MessageItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """`usage.input_tokens_details`."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0
    """Those that cost extra: none."""
    image_tokens: int = 0
    video_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """`usage.output_tokens_details`."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """`usage` of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, counter: UsageCounter) -> "ResponseUsage":
        """Return the count so far."""
        usage = counter.usage()
        details = usage.prompt_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=details.cached_tokens,
                image_tokens=details.image_tokens,
                video_tokens=details.video_tokens,
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=usage.total_tokens,
        )


class ResponseError(msgspec.Struct, kw_only=True):
    """`error` of a failed response."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, with what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    store: bool = True
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
