"""Anthropic's message: its blocks, how it grows, and the events about that."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from mmjax.frontend.output.outputs import CompletionOutput
from mmjax.frontend.output.tool_calls.deltas import as_unicode
from mmjax.server.openai.continuation import new_hex
from mmjax.server.openai.responses import AnswerBuilder, Event, UsageCounter
from mmjax.server.openai.tool_use import AnswerPiece, AnswerReader, CallPiece

StopReason = Literal["end_turn", "max_tokens", "pause_turn", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """What the model says."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """How the model came to it."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool that the model calls."""

    id: str
    name: str
    input: Any = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True):
    """`usage`; `input_tokens` are those that no cache had."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, counter: UsageCounter) -> "MessageUsage":
        """Return the count so far."""
        usage = counter.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - num_cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=num_cached,
        )


class MessageObject(msgspec.Struct, kw_only=True):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageBuilder(AnswerBuilder):
    """Fills a message."""

    def __init__(self, model: str, reader: AnswerReader) -> None:
        super().__init__(reader)
        usage = MessageUsage.of(self.usage)
        self.message = MessageObject(id=f"msg_{new_hex()}", model=model, usage=usage)
        self._arguments = ""
        """Of the tool that is called last."""
        self._is_open = False
        """Whether the last block may grow."""
        self._has_begun = False

    def add(self, output: CompletionOutput, piece: AnswerPiece) -> Iterator[Event]:
        if not self._has_begun:
            self._has_begun = True
            self.message.usage = MessageUsage.of(self.usage)
            yield {"type": "message_start", "message": msgspec.structs.replace(self.message)}
        if piece.reasoning:
            yield from self._grow(ThinkingBlock)
            self._last.thinking += piece.reasoning
            yield self._delta("thinking_delta", thinking=piece.reasoning)
        for part in piece.parts:
            if isinstance(part, CallPiece):
                yield from self._add_call(part)
            elif part:
                yield from self._grow(TextBlock)
                self._last.text += part
                yield self._delta("text_delta", text=part)
        if output.finish_reason is not None:
            yield from self._finish(output, piece)

    @property
    def _last(self) -> Any:
        return self.message.content[-1]

    def _grow(self, kind: type[TextBlock] | type[ThinkingBlock]) -> Iterator[Event]:
        """Begin a block, unless the last one is of this kind."""
        if not self._is_open or not isinstance(self._last, kind):
            yield from self._end_block()
            yield self._begin_block(kind())

    def _add_call(self, piece: CallPiece) -> Iterator[Event]:
        if piece.name is not None:
            yield from self._end_block()
            yield self._begin_block(ToolUseBlock(id=piece.id or "", name=piece.name))
        if piece.arguments:
            self._arguments += piece.arguments
            yield self._delta("input_json_delta", partial_json=piece.arguments)

    def _begin_block(self, block: Block) -> Event:
        self.message.content.append(block)
        self._is_open, self._arguments = True, ""
        shown = msgspec.structs.replace(block)
        return {**self._event("content_block_start"), "content_block": shown}

    def _end_block(self) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        if isinstance(self._last, ToolUseBlock):
            self._last.input = _read_arguments(self._arguments)
        yield self._event("content_block_stop")

    def _finish(self, output: CompletionOutput, piece: AnswerPiece) -> Iterator[Event]:
        yield from self._end_block()
        message = self.message
        message.stop_reason = _stop_reason(output, piece, message.content)
        if message.stop_reason == "stop_sequence":
            message.stop_sequence = str(output.stop_reason)
        message.usage = MessageUsage.of(self.usage)
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield {"type": "message_delta", "delta": delta, "usage": message.usage}
        yield {"type": "message_stop"}

    def _delta(self, kind: str, **fields: str) -> Event:
        return {**self._event("content_block_delta"), "delta": {"type": kind, **fields}}

    def _event(self, kind: str) -> Event:
        return {"type": kind, "index": len(self.message.content) - 1}


def _stop_reason(output: CompletionOutput, piece: AnswerPiece, blocks: list[Block]) -> StopReason:
    if output.finish_reason == "length":
        return "max_tokens"
    if output.finish_reason == "abort":
        # By an operator, who has changed the engine: sent back, the answer goes on.
        return "pause_turn"
    if piece.finish_reason == "tool_calls" or (blocks and isinstance(blocks[-1], ToolUseBlock)):
        return "tool_use"
    return "stop_sequence" if isinstance(output.stop_reason, str) else "end_turn"


def _read_arguments(text: str) -> Any:
    """Return a call's arguments; {} of those that were broken off, or are nested too deep."""
    try:
        given = json.dumps(json.loads(text or "{}"), ensure_ascii=False)
        # Behind the escapes there may be half of a surrogate pair, which no answer can hold.
        return json.loads(as_unicode(given))
    except (ValueError, RecursionError):
        return {}
