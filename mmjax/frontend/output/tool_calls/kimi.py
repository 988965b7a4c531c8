"""Tool calls of Kimi K2 and K2.5, told as they are written.

`<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
<|tool_call_end|><|tool_calls_section_end|>`, in one line and with as many calls as there are. The
number counts the calls of the whole conversation; the chat template shows a call by its id alone.
"""

from mmjax.frontend.output.reasoning import find_overlap
from mmjax.frontend.output.tool_calls.deltas import MAX_HELD_CHARS, SPACES, MarkedCallParser
from mmjax.frontend.output.tool_calls.json_scanner import MAX_NAME_CHARS

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_FUNCTIONS = "functions."


class KimiCallParser(MarkedCallParser):
    """Calls in sections, each behind its id, which holds its function's name."""

    def __init__(self) -> None:
        super().__init__(_SECTION)
        self._has_arguments = False

    def _end(self) -> None:
        if self._read == self._read_arguments:
            self._add_arguments(self._held)
            return
        text = self._opening + self._held
        if not self._num_calls or text.strip(SPACES):
            self._delta.add_text(text)

    # ---- each reads on from `place`, and returns the index behind what it read ------------------

    def _read_marked(self, text: str, place: int) -> int:
        """Read what stands between calls."""
        rest = text[place:]
        begun = rest.lstrip(SPACES)
        start = len(text) - len(begun)
        if begun.startswith(_CALL):
            self._opening += rest[: len(rest) - len(begun)] if self._opening else ""
            self._read = self._read_id
            return start
        if begun.startswith(_SECTION_END) and not self._opening:
            self._read = self._read_text
            return start + len(_SECTION_END)
        is_open = _CALL.startswith(begun) or _SECTION_END.startswith(begun)
        if is_open and len(rest) <= MAX_HELD_CHARS:
            self._held = rest
            return len(text)
        self._refuse(rest[: len(rest) - len(begun)])
        return start

    def _read_id(self, text: str, place: int) -> int:
        """Read a call from its mark up to its arguments."""
        start = place + len(_CALL)
        found = text.find(_ARGUMENTS, start)
        if found < 0 and len(text) - place <= MAX_HELD_CHARS:
            self._held = text[place:]
            return len(text)
        call_id = text[start:found].strip(SPACES) if found >= 0 else ""
        name = _name_of(call_id)
        if name is None:
            self._refuse(_CALL)
            return start
        is_whole = call_id.startswith(f"{_FUNCTIONS}{name}:")
        self._delta.add_call(self._num_calls, name=name, call_id=call_id if is_whole else None)
        self._num_calls += 1
        self._opening, self._has_arguments = "", False
        self._read = self._read_arguments
        return found + len(_ARGUMENTS)

    def _read_arguments(self, text: str, place: int) -> int:
        found = text.find(_CALL_END, place)
        stop = found if found >= 0 else len(text) - find_overlap(text[place:], _CALL_END)
        self._add_arguments(text[place:stop])
        if found < 0:
            self._held = text[stop:]
            return len(text)
        if not self._has_arguments:
            self._add_arguments("{}")
        self._read = self._read_marked
        return found + len(_CALL_END)

    def _add_arguments(self, text: str) -> None:
        if text:
            self._has_arguments = self._has_arguments or bool(text.strip(SPACES))
            self._delta.add_call(self._num_calls - 1, arguments=text)


def _name_of(call_id: str) -> str | None:
    """Return the function's name in an id, `functions.NAME:NUMBER`; None: it is none."""
    name = call_id.removeprefix(_FUNCTIONS)
    before, colon, number = name.rpartition(":")
    if colon and number.isdecimal():
        name = before
    is_name = name.replace("-", "_").replace(".", "_").replace("_", "a").isalnum()
    return name if is_name and len(name) <= MAX_NAME_CHARS else None
