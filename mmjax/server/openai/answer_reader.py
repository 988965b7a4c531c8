"""Read a chat's answers: text, tool calls, and why they ended. One way for streams and wholes."""

from dataclasses import dataclass, field

from mmjax.frontend.output.outputs import CompletionOutput
from mmjax.frontend.output.tool_calls.parsers import ToolCallParser
from mmjax.server.openai.tool_use import ToolUse


@dataclass(slots=True, kw_only=True)
class CallPiece:
    """What a piece of an answer adds to one call."""

    index: int
    id: str | None
    """In the call's first piece alone, as the name."""
    name: str | None
    arguments: str


@dataclass(slots=True, kw_only=True)
class AnswerPiece:
    """What an output adds to one of a chat's answers."""

    text: str
    calls: list[CallPiece] = field(default_factory=list)
    finish_reason: str | None = None


class AnswerReader:
    """Reads the `n` answers of one chat."""

    def __init__(self, tools: ToolUse | None, *, echo: str = "") -> None:
        """`echo`: text that comes before each answer."""
        self._tools = tools
        self._echo = echo
        self._parsers: dict[int, ToolCallParser] = {}
        self._num_calls: dict[int, int] = {}
        self._begun: set[int] = set()

    @property
    def holds_text_back(self) -> bool:
        """Whether an output may add nothing that can be shown yet."""
        return self._tools is not None

    def read(self, output: CompletionOutput) -> AnswerPiece:
        """Return what `output` adds; each text must come once."""
        piece = self._parse(output)
        if output.index not in self._begun:
            self._begun.add(output.index)
            piece.text = self._echo + piece.text
        return piece

    def _parse(self, output: CompletionOutput) -> AnswerPiece:
        tools, index = self._tools, output.index
        if tools is None:
            return AnswerPiece(text=output.text, finish_reason=output.finish_reason)
        if index not in self._parsers:
            self._parsers[index] = tools.parser()
        parser = self._parsers[index]
        deltas = [parser.push(output.text)]
        if output.finish_reason is not None:
            deltas.append(parser.finish())
        calls = [
            CallPiece(
                index=call.index,
                id=None if call.name is None else tools.new_call_id(),
                name=call.name,
                arguments=call.arguments,
            )
            for delta in deltas
            for call in delta.calls
            if tools.is_parallel or call.index == 0
        ]
        num_calls = self._num_calls.get(index, 0) + sum(call.name is not None for call in calls)
        self._num_calls[index] = num_calls
        return AnswerPiece(
            text="".join(delta.text for delta in deltas),
            calls=calls,
            finish_reason=tools.finish_reason(output.finish_reason, num_calls),
        )


def join_calls(pieces: list[CallPiece]) -> list[CallPiece]:
    """Return whole calls from the pieces of one answer."""
    whole: dict[int, CallPiece] = {}
    for piece in pieces:
        call = whole.setdefault(
            piece.index, CallPiece(index=piece.index, id=piece.id, name=piece.name, arguments="")
        )
        call.arguments += piece.arguments
    return list(whole.values())
