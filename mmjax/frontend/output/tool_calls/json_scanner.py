"""Read a tool call's JSON as it comes: its name, and its arguments' characters.

One pass over the characters, so that a long answer costs no more than a short one, each.
"""

import json

from mmjax.frontend.output.tool_calls.deltas import SPACES

MAX_NAME_CHARS = 256


class ValueScanner:
    """Finds the end of one JSON value; does not check what stands within."""

    def __init__(self, *, depth: int = 0, quotes: str = '"', brackets: str = "{[}]") -> None:
        """`depth`: brackets that are open; `brackets`: those that open, then those that close."""
        middle = len(brackets) // 2
        self._depth, self._quotes = depth, quotes
        self._opening, self._closing = brackets[:middle], brackets[middle:]
        self._quote = ""
        self._is_escaped = False
        self._has_begun = False
        self.is_done = False

    def push(self, text: str, start: int = 0) -> int:
        """Read on from `start`; return the index behind the value, or `len(text)`."""
        for place in range(start, len(text)):
            character = text[place]
            if self._ends_before(character):
                self.is_done = True
                return place
            self._advance(character)
            if self.is_done:
                return place + 1
        return len(text)

    def _ends_before(self, character: str) -> bool:
        """Return whether a number or a word ends here: it has no closing mark of its own."""
        is_bare = self._has_begun and not self._depth and not self._quote
        return is_bare and character in ",]}" + SPACES

    def _advance(self, character: str) -> None:
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == self._quote:
                self._quote = ""
                self.is_done = not self._depth
            return
        if character in SPACES:
            return
        self._has_begun = True
        if character in self._quotes:
            self._quote = character
        elif character in self._opening:
            self._depth += 1
        elif character in self._closing:
            self._depth -= 1
            self.is_done = self._depth <= 0


def call_scanner() -> ValueScanner:
    """Return what finds the bracket that closes a call as Python writes it, behind the opening."""
    return ValueScanner(depth=1, quotes="'\"", brackets="([{)]}")


class JsonCallScanner:
    """Reads `{"name": ..., "arguments": {...}}`; `parameters` is another word for arguments."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_wrong = False
        """Whether this is no call: what was read is text."""
        self._read_texts: list[str] = []
        self._state = "start"
        self._key = ""
        self._value = ValueScanner()
        self._value_texts: list[str] = []
        self._streams_value = False
        self._has_arguments = False
        self._pending: list[str] = []

    @property
    def raw(self) -> str:
        """What was read since arguments were taken; of what is wrong the last character is."""
        return "".join(self._read_texts)

    @property
    def has_more(self) -> bool:
        """Whether there are arguments to take, and the name is known: then it is a call.

        Not before: what a stream has told is not taken back.
        """
        return self.name is not None and bool(self._pending)

    def push(self, text: str, start: int = 0) -> int:
        """Read on from `start` up to arguments to take; return the index behind what was read."""
        place = start
        while place < len(text) and not (self.is_done or self.is_wrong or self.has_more):
            place = self._read(text, place)
        self._read_texts.append(text[start:place])
        self.is_wrong |= self.is_done and self.name is None
        if self.is_done and not self._has_arguments:
            self._has_arguments, self._pending = True, ["{}"]
        return place

    def take_arguments(self) -> str:
        """Return the arguments' characters since the last call."""
        taken = "".join(self._pending)
        self._pending, self._read_texts = [], []
        return taken

    def _read(self, text: str, place: int) -> int:
        if self._state == "value":
            return self._read_value(text, place)
        character = text[place]
        if self._state == "key":
            self._read_key(character)
        elif character not in SPACES:
            self._read_mark(character)
        return place + 1

    def _read_mark(self, character: str) -> None:
        match self._state, character:
            case "start", "{":
                self._state = "members"
            case "members", '"':
                self._state, self._key = "key", ""
            case "members", ",":
                pass
            case "members", "}":
                self.is_done = True
            case "colon", ":":
                self._state, self._value, self._value_texts = "value", ValueScanner(), []
                self._streams_value = False
            case _:
                self.is_wrong = True

    def _read_key(self, character: str) -> None:
        if character == '"':
            self._state = "colon"
        elif len(self._key) < MAX_NAME_CHARS:
            self._key += character
        else:
            self.is_wrong = True

    def _read_value(self, text: str, place: int) -> int:
        end = self._value.push(text, place)
        piece = text[place:end]
        is_first = not self._value_texts
        if is_first:
            piece = piece.lstrip(SPACES)
        if piece:
            self._keep(piece, is_first=is_first)
        if self._value.is_done:
            self._state = "members"
            self._end_value()
        return end

    def _keep(self, piece: str, *, is_first: bool) -> None:
        if is_first and self._is_of_arguments and piece.startswith("{"):
            self._streams_value = self._has_arguments = True
        self._value_texts.append("" if self._streams_value else piece)
        if self._streams_value:
            self._pending.append(piece)

    def _end_value(self) -> None:
        if self._streams_value:
            return
        text = "".join(self._value_texts)
        value = _load(text)
        if self._key == "name" and self.name is None:
            is_name = isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARS
            self.name = str(value) if is_name else None
            self.is_wrong = not is_name
        elif self._is_of_arguments and value is not None:
            # Some models write the object as a text; what is none stays as it is.
            self._has_arguments = True
            self._pending = [(value or "{}") if isinstance(value, str) else text]

    @property
    def _is_of_arguments(self) -> bool:
        return self._key in ("arguments", "parameters") and not self._has_arguments


def _load(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
