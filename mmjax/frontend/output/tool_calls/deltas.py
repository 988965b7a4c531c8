"""What a parser of tool calls makes of an answer, piece by piece, and how it goes through one."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from mmjax.frontend.output.reasoning import find_overlap

SPACES = " \t\r\n"
MAX_HELD_CHARS = 1024
"""The text that may yet be part of a call, at most; beyond it is text: the time stays linear."""


@dataclass(slots=True, kw_only=True)
class ToolCallDelta:
    """What a piece of an answer adds to one tool call."""

    index: int
    name: str | None = None
    """In the call's first delta alone."""
    call_id: str | None = None
    """Likewise, where the model itself gives it one."""
    arguments: str = ""
    """The next characters of a JSON object."""


@dataclass(slots=True, kw_only=True)
class AnswerDelta:
    """What a piece of an answer adds: text for the reader, and tool calls."""

    parts: list[str | ToolCallDelta] = field(default_factory=list)
    """In the answer's order."""

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCallDelta]:
        """What is added to calls."""
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]

    def add_text(self, text: str) -> None:
        """Append text for the reader."""
        if text:
            self.parts.append(text)

    def add_call(
        self,
        index: int,
        *,
        name: str | None = None,
        call_id: str | None = None,
        arguments: str = "",
    ) -> None:
        """Append to call `index`; deltas of one call in a row become one."""
        name, arguments = name and as_unicode(name), as_unicode(arguments)
        last = self.parts[-1] if self.parts else None
        if isinstance(last, ToolCallDelta) and name is None and last.index == index:
            last.arguments += arguments
        else:
            self.parts.append(
                ToolCallDelta(index=index, name=name, call_id=call_id, arguments=arguments)
            )


def as_unicode(text: str) -> str:
    r"""Return a text with the surrogates that a model wrote as `\ud83d` made characters."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class CallParser:
    """Reads one answer from its beginning to its end."""

    def __init__(self) -> None:
        self._read: Callable[[str, int], int] = self._read_rest
        """Reads on from a place in a text, and returns the index behind what it read."""
        self._held = ""
        """What may yet be part of a call: text, if nothing comes of it."""
        self._num_calls = 0
        self._delta = AnswerDelta()

    def push(self, text: str) -> AnswerDelta:
        """Return what `text` adds."""
        self._delta = AnswerDelta()
        text, self._held = self._held + text, ""
        place = 0
        while place < len(text):
            place = self._read(text, place)
        return self._delta

    def finish(self) -> AnswerDelta:
        """Return what was held back, at the end of the answer."""
        self._delta = AnswerDelta()
        self._end()
        self._held = ""
        return self._delta

    def _end(self) -> None:
        """Give out what of `_held` is text."""

    def _read_rest(self, text: str, place: int) -> int:
        self._delta.add_text(text[place:])
        return len(text)


class MarkedCallParser(CallParser):
    """Reads text up to a mark, and calls behind it."""

    def __init__(self, start: str, *, beginnings: Sequence[str] = ()) -> None:
        """`start`: the mark; `beginnings`: what an answer of calls begins with, one of them."""
        super().__init__()
        self._start, self._beginnings = start, beginnings
        self._read = self._read_beginning if beginnings else self._read_text
        self._opening = ""
        """What was read before the first name: text, if it has none."""

    def _read_beginning(self, text: str, place: int) -> int:
        """Decide by the first characters whether the answer is of calls."""
        begun = text[place:].lstrip(SPACES)
        for mark in self._beginnings:
            if begun.startswith(mark):
                return self._open(text, place, len(text) - len(begun) + len(mark))
            if mark.startswith(begun) and len(text) <= MAX_HELD_CHARS:
                self._held = text[place:]
                return len(text)
        self._read = self._read_rest
        return place

    def _read_text(self, text: str, place: int) -> int:
        """Give out the text before a mark; hold what may be its beginning."""
        found = text.find(self._start, place)
        if found >= 0:
            # The line break before a call belongs to neither.
            shown = text[place:found].rstrip(SPACES)
            self._delta.add_text(shown)
            return self._open(text, place + len(shown), found + len(self._start))
        shown = text[place:]
        kept = len(shown) - find_overlap(shown, self._start)
        kept = len(shown[:kept].rstrip(SPACES))
        if len(shown) - kept > MAX_HELD_CHARS:
            kept = len(shown)
        self._delta.add_text(shown[:kept])
        self._held = shown[kept:]
        return len(text)

    def _open(self, text: str, place: int, behind: int) -> int:
        """Keep a mark, with the spaces before it, and read on behind it."""
        self._opening, self._read = text[place:behind], self._read_marked
        return behind

    def _read_marked(self, text: str, place: int) -> int:
        """Read on behind a mark."""
        raise NotImplementedError

    def _refuse(self, raw: str) -> None:
        """Take as text what looked like a call."""
        self._delta.add_text(self._opening + raw)
        self._opening, self._read = "", self._read_text


class AllowedCallParser(CallParser):
    """Reads an answer as another parser does, and leaves out calls that are not allowed."""

    def __init__(self, parser: CallParser, allowed: Collection[str]) -> None:
        """`allowed`: names of functions."""
        super().__init__()
        self._parser, self._allowed = parser, allowed
        self._shown: dict[int, int] = {}
        """Index of a call of the answer -> its index among those that are allowed."""

    def push(self, text: str) -> AnswerDelta:
        """Return what `text` adds."""
        return self._filtered(self._parser.push(text))

    def finish(self) -> AnswerDelta:
        """Return what was held back, at the end of the answer."""
        return self._filtered(self._parser.finish())

    def _filtered(self, delta: AnswerDelta) -> AnswerDelta:
        for call in delta.calls:
            if call.name in self._allowed:
                self._shown[call.index] = len(self._shown)
        shown = [part for part in delta.parts if isinstance(part, str) or part.index in self._shown]
        filtered = AnswerDelta(parts=shown)
        for call in filtered.calls:
            call.index = self._shown[call.index]
        return filtered
