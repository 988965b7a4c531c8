"""OpenAI's response object: its items, how it grows, and the events about that."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import msgspec

from mmjax.errors import RequestError
from mmjax.frontend.output.outputs import CompletionOutput
from mmjax.server.openai.continuation import new_hex
from mmjax.server.openai.errors import error_body
from mmjax.server.openai.responses import (
    AnswerBuilder,
    ChoiceOptions,
    Event,
    TokenLogprob,
    UsageCounter,
    chat_logprobs,
)
from mmjax.server.openai.tool_use import AnswerPiece, AnswerReader, CallPiece

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
    audio_tokens: int = 0


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
            input_tokens_details=InputTokensDetails(**msgspec.structs.asdict(details)),
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


class ResponseBuilder(AnswerBuilder):
    """Fills a response."""

    def __init__(
        self, response: ResponseObject, options: ChoiceOptions, reader: AnswerReader
    ) -> None:
        super().__init__(reader)
        self.response = response
        self._options = options
        self._num_events = 0
        self._logprobs: list[TokenLogprob] = []
        """Of tokens whose text has not come yet: a character's first bytes, a stop string's."""
        self._index_of_call: dict[int, int] = {}
        """Index of a call among the answer's calls -> index of its item."""

    @property
    def is_finished(self) -> bool:
        """Whether the response has its last status."""
        return self.response.status != "in_progress"

    def begin(self) -> list[Event]:
        """Return the events before the first piece."""
        return [
            self._event("response.created", response=self._snapshot()),
            self._event("response.in_progress", response=self._snapshot()),
        ]

    def add(self, output: CompletionOutput, piece: AnswerPiece) -> Iterator[Event]:
        logprobs = chat_logprobs(output.logprobs, self._options)
        self._logprobs += [] if logprobs is None else logprobs.content
        if piece.is_thought:
            # No response shows it.
            self._logprobs = []
        for part in piece.parts:
            if isinstance(part, CallPiece):
                yield from self._add_call(part)
            elif part:
                yield from self._add_text(part)
        if piece.calls:
            # The tokens of their marks are no message's.
            self._logprobs = []
        if output.finish_reason is not None:
            if self._has_last_logprobs():
                yield from self._add_text("")
            yield from self._finish(output)

    def fail(self, error: RequestError) -> list[Event]:
        """End the response with an error."""
        info = error_body(error).error
        self.response.error = ResponseError(code=str(info.code), message=info.message)
        return self._end("failed", "response.failed")

    def cancel(self) -> list[Event]:
        """End the response, as somebody asked."""
        return self._end("cancelled", "response.incomplete")

    # ---- items ----------------------------------------------------------------------------------

    def _has_last_logprobs(self) -> bool:
        """Return whether the tokens that end a message, as EOS, have any."""
        items = self.response.output
        return bool(items) and isinstance(items[-1], MessageItem) and bool(self._logprobs)

    def _add_text(self, text: str) -> Iterator[Event]:
        items = self.response.output
        if not items or not isinstance(items[-1], MessageItem):
            yield from self._end_item("completed")
            yield from self._begin_message()
        item, index = cast(MessageItem, items[-1]), len(items) - 1
        added, self._logprobs = self._logprobs, []
        item.content[0].text += text
        item.content[0].logprobs += added
        yield self._event(
            "response.output_text.delta",
            item_id=item.id,
            output_index=index,
            content_index=0,
            delta=text,
            logprobs=added,
        )

    def _begin_message(self) -> Iterator[Event]:
        item = MessageItem(id=f"msg_{new_hex()}")
        yield self._begin_item(item)
        item.content = [OutputText()]
        yield self._event(
            "response.content_part.added",
            item_id=item.id,
            output_index=len(self.response.output) - 1,
            content_index=0,
            part=OutputText(),
        )

    def _add_call(self, piece: CallPiece) -> Iterator[Event]:
        items = self.response.output
        if piece.name is not None:
            yield from self._end_item("completed")
            item = FunctionCallItem(id=f"fc_{new_hex()}", call_id=piece.id or "", name=piece.name)
            self._index_of_call[piece.index] = len(items)
            yield self._begin_item(item)
        index = self._index_of_call[piece.index]
        item = cast(FunctionCallItem, items[index])
        if piece.arguments:
            item.arguments += piece.arguments
            yield self._event(
                "response.function_call_arguments.delta",
                item_id=item.id,
                output_index=index,
                delta=piece.arguments,
            )

    def _begin_item(self, item: OutputItem) -> Event:
        self.response.output.append(item)
        return self._event(
            "response.output_item.added",
            output_index=len(self.response.output) - 1,
            item=msgspec.structs.replace(item),
        )

    def _end_item(self, status: Status) -> Iterator[Event]:
        """End the last item, if there is one that has not ended."""
        if not self.response.output or self.response.output[-1].status != "in_progress":
            return
        item, index = self.response.output[-1], len(self.response.output) - 1
        item.status = status
        place = {"item_id": item.id, "output_index": index}
        if isinstance(item, MessageItem):
            # Without one, if the client left right after the item began.
            for part in item.content:
                place["content_index"] = 0
                yield self._event(
                    "response.output_text.done", **place, text=part.text, logprobs=part.logprobs
                )
                yield self._event("response.content_part.done", **place, part=part)
        else:
            yield self._event(
                "response.function_call_arguments.done",
                **place,
                name=item.name,
                arguments=item.arguments,
            )
        yield self._event("response.output_item.done", output_index=index, item=item)

    # ---- the end --------------------------------------------------------------------------------

    def _finish(self, output: CompletionOutput) -> Iterator[Event]:
        if not self.response.output:
            yield from self._begin_message()
        last = self.response.output[-1]
        if output.parsed is not None and isinstance(last, MessageItem):
            last.parsed = output.parsed
        if output.finish_reason == "length":
            self.response.incomplete_details = IncompleteDetails()
            yield from self._end("incomplete", "response.incomplete")
        elif output.finish_reason == "abort":
            # By an operator, who has changed the engine.
            yield from self.cancel()
        else:
            yield from self._end("completed", "response.completed")

    def _end(self, status: Status, kind: str) -> list[Event]:
        events = list(self._end_item("completed" if status == "completed" else "incomplete"))
        self.response.status = status
        self.response.completed_at = int(time.time()) if status == "completed" else None
        self.response.usage = ResponseUsage.of(self.usage)
        return [*events, self._event(kind, response=self._snapshot())]

    def _snapshot(self) -> ResponseObject:
        return msgspec.structs.replace(self.response, output=list(self.response.output))

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}
