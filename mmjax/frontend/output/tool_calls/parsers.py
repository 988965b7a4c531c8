"""Parsers of tool calls in an answer's text, one for each format that models were trained on.

Text goes in as it is generated, and comes out as text for the reader and as calls: whole answers
take the same way as streams. No regular expressions: a model's text may be a user's.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from mmjax.frontend.output.tool_calls.bodies import (
    BodyCallParser,
    Functions,
    read_gemma_call,
    read_glm_call,
    read_qwen_call,
)
from mmjax.frontend.output.tool_calls.deltas import (
    MAX_HELD_CHARS,
    SPACES,
    CallParser,
    MarkedCallParser,
)
from mmjax.frontend.output.tool_calls.json_scanner import (
    MAX_NAME_CHARS,
    JsonCallScanner,
    ValueScanner,
    call_scanner,
)
from mmjax.frontend.output.tool_calls.kimi import KimiCallParser
from mmjax.frontend.output.tool_calls.python_literals import LiteralReader

_FENCE = "```"
_PYTHON_BEGINNINGS = (f"{_FENCE}tool_code", f"{_FENCE}python", "<|python_start|>", "[")
_MAX_PYTHON_CHARS = 2**18


class NamedCallParser(CallParser):
    """The whole answer is the arguments of one function, whose name is known: `tool_choice`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name: str | None = name

    def _read_rest(self, text: str, place: int) -> int:
        self._delta.add_call(0, name=self._name, arguments=text[place:])
        self._name = None
        return len(text)


class JsonCallParser(MarkedCallParser):
    """Calls as JSON objects, behind a mark or, without one, from the answer's beginning on.

    With `takes_names`, also as `name{...}` and `name[ARGS]{...}`.
    """

    def __init__(
        self,
        *,
        start: str,
        end: str = "",
        takes_names: bool = False,
        tool_names: Collection[str] | None = None,
    ) -> None:
        """`tool_names`: the answer may begin with a call without `start`, of one of these."""
        beginnings = () if tool_names is None else (start, f"{_FENCE}json", "[")
        super().__init__(start, beginnings=beginnings)
        self._mark = end
        self._takes_names = takes_names
        self._tool_names = tool_names
        self._call: JsonCallScanner | None = None
        self._arguments: ValueScanner | None = None
        self._is_named = False

    def _end(self) -> None:
        held = self._held
        if self._call is not None and not self._is_named:
            held = self._call.raw + held
        if not self._num_calls or held.strip(SPACES):
            self._delta.add_text(self._opening + held)

    # ---- each reads on from `place`, and returns the index behind what it read ------------------

    def _read_beginning(self, text: str, place: int) -> int:
        begun = text[place:].lstrip(SPACES)
        if begun.startswith("{"):
            return self._open(text, place, len(text) - len(begun))
        return super()._read_beginning(text, place)

    def _read_marked(self, text: str, place: int) -> int:
        """Read what stands between calls: brackets, commas, the closing mark."""
        if self._mark and text.startswith(self._mark, place):
            self._read = self._read_text
            return place + len(self._mark)
        character = text[place]
        if character in SPACES + "[],;" and len(self._opening) < MAX_HELD_CHARS:
            self._opening += character if self._opening else ""
            return place + 1
        if character == "{":
            self._call, self._is_named = JsonCallScanner(), False
            self._read = self._read_call
            return place
        rest = text[place:]
        if self._mark and self._mark.startswith(rest):
            self._held = rest
            return len(text)
        if self._takes_names and (character.isalnum() or character == "_"):
            self._read = self._read_name
            return place
        self._refuse("")
        return place

    def _read_call(self, text: str, place: int) -> int:
        call = self._call
        assert call is not None
        end = call.push(text, place)
        is_known = self._tool_names is None or call.name in self._tool_names
        if call.is_wrong and self._is_named:
            # The closing mark may stand here, where a brace is missing.
            self._call, self._read = None, self._read_marked
            unread = call.raw[:-1]
            self._delta.add_text(unread if unread.strip(SPACES + ",") else "")
            return end - 1
        if call.is_wrong or (call.name is not None and not is_known):
            self._call = None
            self._refuse(call.raw)
            return end
        if call.name is not None and call.has_more:
            if not self._is_named:
                self._begin_call(call.name)
            self._delta.add_call(self._num_calls - 1, arguments=call.take_arguments())
        if call.is_done:
            self._call = None
            self._read = self._read_marked
        return end

    def _read_name(self, text: str, place: int) -> int:
        """Read `name` or `name[ARGS]`, up to its arguments."""
        opening = text.find("{", place)
        if opening < 0 and len(text) - place <= MAX_NAME_CHARS:
            self._held = text[place:]
            return len(text)
        name = text[place:opening].partition("[")[0].strip(SPACES) if opening >= 0 else ""
        if not name or not all(letter.isalnum() or letter in "_-." for letter in name):
            self._refuse("")
            return place
        self._begin_call(name)
        self._arguments = ValueScanner()
        self._read = self._read_arguments
        return opening

    def _read_arguments(self, text: str, place: int) -> int:
        scanner = self._arguments
        assert scanner is not None
        end = scanner.push(text, place)
        self._delta.add_call(self._num_calls - 1, arguments=text[place:end])
        if scanner.is_done:
            self._arguments = None
            # The mark stands before each call of this form.
            self._read = self._read_text
        return end

    def _begin_call(self, name: str) -> None:
        self._is_named, self._opening = True, ""
        self._delta.add_call(self._num_calls, name=name)
        self._num_calls += 1


class PythonCallParser(MarkedCallParser):
    """The whole answer is a list of calls as Python writes them: `[f(a=1), g(b="x")]`.

    Also within a fence: "```tool_code". A call comes out when its closing bracket is there. With
    marks of their own such lists may stand anywhere in an answer.
    """

    def __init__(self, *, tool_names: Collection[str], start: str = "", end: str = _FENCE) -> None:
        """`start`: the mark before each list, if lists have one; `end`: what may close them."""
        super().__init__(start, beginnings=() if start else _PYTHON_BEGINNINGS)
        self._tool_names = tool_names
        self._mark = end
        self._name = ""
        self._scanner: ValueScanner | None = None
        """Of the arguments of a call."""
        self._arguments: list[str] = []
        self._num_chars = 0

    def _end(self) -> None:
        if self._scanner is not None:
            self._delta.add_text(self._unread())
        elif not self._num_calls:
            self._delta.add_text(self._opening + self._held)
        elif self._read == self._read_text and self._held.strip(SPACES):
            self._delta.add_text(self._held)

    def _read_marked(self, text: str, place: int) -> int:
        """Hold all back until the first name is there: else it is text that begins alike."""
        begun = text[place:].lstrip(SPACES + "[")
        behind = len(text) - len(begun)
        name, bracket, _ = begun.partition("(")
        is_open = not bracket and len(self._opening) + len(text) - place <= MAX_HELD_CHARS
        if is_open and self._begins_a_name(name):
            self._held = text[place:]
            return len(text)
        if bracket and name.strip(SPACES) in self._tool_names:
            self._read = self._read_name
            self._opening += text[place:behind]
            return behind
        self._refuse("")
        self._read = self._read_rest
        return place

    def _begins_a_name(self, text: str) -> bool:
        """Whether a tool's name, also a whole one, may begin with a text: its bracket may follow.

        As the name does before its bracket, the text may end with spaces.
        """
        begun = text.rstrip(SPACES)
        return any(known.startswith(begun) for known in self._tool_names)

    def _read_name(self, text: str, place: int) -> int:
        rest = text[place:]
        begun = rest.lstrip(SPACES + "[],;")
        name, bracket, _ = begun.partition("(")
        if bracket and name.strip(SPACES) in self._tool_names:
            self._name, self._read = name.strip(SPACES), self._read_arguments
            self._scanner, self._arguments, self._num_chars = call_scanner(), [], 0
            return len(text) - len(begun) + len(name) + 1
        is_open = not bracket and len(rest) <= MAX_HELD_CHARS
        may_be_mark = name != self._mark and self._mark.startswith(name)
        if is_open and (may_be_mark or self._begins_a_name(name)):
            self._held = begun
            return len(text)
        if self._start and begun.startswith(self._mark):
            self._read = self._read_text
            return len(text) - len(begun) + len(self._mark)
        self._read = self._read_rest
        self._delta.add_text(begun.removeprefix(self._mark))
        return len(text)

    def _read_arguments(self, text: str, place: int) -> int:
        assert self._scanner is not None
        end = self._scanner.push(text, place)
        self._arguments.append(text[place:end])
        self._num_chars += end - place
        if self._num_chars > _MAX_PYTHON_CHARS:
            self._give_up()
        elif self._scanner.is_done:
            self._end_call()
        return end

    def _end_call(self) -> None:
        try:
            found = LiteralReader("".join(self._arguments)[:-1]).arguments()
            arguments = json.dumps(found, ensure_ascii=False, allow_nan=False)
        except ValueError:
            self._give_up()
            return
        self._delta.add_call(self._num_calls, name=self._name, arguments=arguments)
        self._num_calls += 1
        self._read, self._scanner, self._arguments = self._read_name, None, []

    def _give_up(self) -> None:
        self._delta.add_text(self._unread())
        self._read, self._scanner, self._opening = self._read_rest, None, ""

    def _unread(self) -> str:
        """Return the text of a call that is none."""
        opening = "" if self._num_calls else self._opening
        return f"{opening}{self._name}({''.join(self._arguments)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """A format of tool calls, under vLLM's name for its parser."""

    make: Callable[[Functions], CallParser]
    """The functions that may be called -> the parser of one answer."""
    keeps_special_tokens: bool = False
    """Whether the marks are special tokens, which must stay in the text."""
    id_length: int | None = None
    """The length of a call's id, where the chat template asks for one."""
    has_names_in_ids: bool = False
    """Whether a call's id is `functions.NAME:NUMBER`, which the chat template shows alone."""


TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    "gemma4": ToolCallFormat(
        make=lambda functions: BodyCallParser(
            start="<|tool_call>", end="<tool_call|>", read=read_gemma_call
        ),
        keeps_special_tokens=True,
    ),
    "glm45": ToolCallFormat(
        make=lambda functions: BodyCallParser(
            start="<tool_call>",
            end="</tool_call>",
            read=partial(read_glm_call, functions=functions),
        ),
        keeps_special_tokens=True,
    ),
    "hermes": ToolCallFormat(
        make=lambda functions: JsonCallParser(start="<tool_call>", end="</tool_call>")
    ),
    "internlm": ToolCallFormat(
        make=lambda functions: JsonCallParser(
            start="<|action_start|><|plugin|>", end="<|action_end|>"
        ),
        keeps_special_tokens=True,
    ),
    "kimi_k2": ToolCallFormat(
        make=lambda functions: KimiCallParser(), keeps_special_tokens=True, has_names_in_ids=True
    ),
    "lfm2": ToolCallFormat(
        make=lambda functions: PythonCallParser(
            tool_names=functions.keys(), start="<|tool_call_start|>", end="<|tool_call_end|>"
        ),
        keeps_special_tokens=True,
    ),
    "llama3_json": ToolCallFormat(
        make=lambda functions: JsonCallParser(
            start="<|python_tag|>", end=_FENCE, tool_names=functions.keys()
        ),
        keeps_special_tokens=True,
    ),
    "mistral": ToolCallFormat(
        make=lambda functions: JsonCallParser(start="[TOOL_CALLS]", takes_names=True),
        keeps_special_tokens=True,
        id_length=9,
    ),
    "pythonic": ToolCallFormat(
        make=lambda functions: PythonCallParser(tool_names=functions.keys())
    ),
    "qwen3_coder": ToolCallFormat(
        make=lambda functions: BodyCallParser(
            start="<tool_call>",
            end="</tool_call>",
            read=partial(read_qwen_call, functions=functions),
        ),
    ),
}
"""By vLLM's name of the parser."""


def required_call_parser() -> CallParser:
    """Return the parser of `tool_choice` "required": the answer is a JSON list of calls."""
    return JsonCallParser(start="[")
