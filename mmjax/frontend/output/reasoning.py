r"""Tell a model's reasoning from its answer, piece by piece.

Models that reason write it first, between two marks. Some chat templates write the opening mark
into the prompt, so that an answer begins within: Qwen3-VL-Thinking's ends in `<think>\n`. Others
close it there, and the answer has none. So what the prompt ends with decides, and not the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_SPACES = " \t\r\n"
_MAX_HELD_CHARS = 256
"""Spaces before an opening mark, at most; more are text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks around a model's reasoning."""

    start: str
    end: str
    label: str = ""
    """What the model writes behind `start` of every reasoning, and is no part of it."""
    keeps_special_tokens: bool = False
    """Whether the marks are special tokens, which must stay in the text."""

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning, which the answer goes on with."""
        return prompt.rfind(self.start) > prompt.rfind(self.end)


_THINK = ReasoningFormat(start="<think>", end="</think>")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "gemma4": ReasoningFormat(
        start="<|channel>", end="<channel|>", label="thought\n", keeps_special_tokens=True
    ),
    "glm45": _THINK,
    "mistral": ReasoningFormat(start="[THINK]", end="[/THINK]", keeps_special_tokens=True),
    "qwen3": _THINK,
}
"""By vLLM's name of the parser."""


class AnswerPart(NamedTuple):
    """What a piece of an answer adds to its reasoning, and to what it says."""

    reasoning: str = ""
    text: str = ""


class ReasoningReader:
    """Reads one answer."""

    def __init__(self, form: ReasoningFormat, *, is_open: bool) -> None:
        """`is_open`: the answer begins within reasoning (`ReasoningFormat.is_open`)."""
        self._format = form
        self._state = "label" if is_open else "beginning"
        self._held = ""

    @property
    def is_within(self) -> bool:
        """Whether the answer so far ends within reasoning."""
        return self._state in ("label", "reasoning")

    def push(self, text: str) -> AnswerPart:
        """Return what `text` adds."""
        text, self._held = self._held + text, ""
        if self._state == "beginning":
            text = self._read_mark(text)
        if self._state == "label":
            text = self._read_label(text)
        if self._state == "reasoning":
            return self._read_reasoning(text)
        return AnswerPart(text=text) if self._state == "text" else AnswerPart()

    def finish(self) -> AnswerPart:
        """Return what was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return AnswerPart(reasoning=held) if self.is_within else AnswerPart(text=held)

    # ---- each returns what is left for the next state, or holds it back --------------------------

    def _read_mark(self, text: str) -> str:
        start, begun = self._format.start, text.lstrip(_SPACES)
        if begun.startswith(start):
            self._state = "label"
            return begun.removeprefix(start)
        if start.startswith(begun) and len(text) <= _MAX_HELD_CHARS:
            return self._hold(text)
        self._state = "text"
        return text

    def _read_label(self, text: str) -> str:
        label = self._format.label
        if len(text) < len(label) and label.startswith(text):
            return self._hold(text)
        self._state = "reasoning"
        return text.removeprefix(label)

    def _read_reasoning(self, text: str) -> AnswerPart:
        reasoning, mark, answer = text.partition(self._format.end)
        if mark:
            self._state = "text"
            return AnswerPart(reasoning, answer)
        kept = len(text) - find_overlap(text, self._format.end)
        self._held = text[kept:]
        return AnswerPart(reasoning=text[:kept])

    def _hold(self, text: str) -> str:
        self._held = text
        return ""


def find_overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that `mark` begins with."""
    lengths = range(min(len(text), len(mark) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)
