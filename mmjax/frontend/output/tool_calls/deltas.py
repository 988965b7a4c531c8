"""What a parser of tool calls makes of an answer, piece by piece."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class ToolCallDelta:
    """What a piece of an answer adds to one tool call."""

    index: int
    name: str | None = None
    """In the call's first delta alone."""
    arguments: str = ""
    """The next characters of a JSON object."""


@dataclass(slots=True, kw_only=True)
class AnswerDelta:
    """What a piece of an answer adds: text for the reader, and tool calls."""

    text: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def add_text(self, text: str) -> None:
        """Append text for the reader."""
        self.text += text

    def add_call(self, index: int, *, name: str | None = None, arguments: str = "") -> None:
        """Append to call `index`; deltas of one call in a row become one."""
        if self.calls and name is None and self.calls[-1].index == index:
            self.calls[-1].arguments += arguments
        else:
            self.calls.append(ToolCallDelta(index=index, name=name, arguments=arguments))
