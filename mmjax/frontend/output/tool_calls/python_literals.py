"""Read the arguments of a call as Python writes it: `city="Paris", days=[1, 2]`.

By hand: `ast` may exhaust the stack of the process over what a model wrote.
"""

import sys
from collections.abc import Callable
from string import hexdigits
from typing import Any, TypeVar

from mmjax.frontend.output.tool_calls.deltas import SPACES

T = TypeVar("T")

_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0"},
    **{mark: mark for mark in "\\'\"/"},
    "\n": "",
}
"""Python's and JSON's; behind any other character a backslash stands for itself, as in Python."""
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits of a character's number behind the backslash and this letter."""
_MAX_DEPTH = 32
_MAX_NUMBER_CHARS = 40


class LiteralReader:
    """Reads one literal, or a call's arguments; ValueError for anything else."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def literal(self) -> Any:
        """Return the value that the text is."""
        found = self._value(0)
        if self._peek():
            raise ValueError("text behind a value")
        return found

    def arguments(self) -> dict[str, Any]:
        """Return what `name=literal` and commas say, to the end of the text."""
        found: dict[str, Any] = {}
        while self._peek():
            name = self._word()
            self._expect("=")
            if name in found:
                raise ValueError("an argument is given twice")
            found[name] = self._value(0)
            if self._peek():
                self._expect(",")
        return found

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        match self._peek():
            case "'" | '"':
                return self._string()
            case "[":
                return self._members("[]", lambda: self._value(depth + 1))
            case "(":
                return self._group(depth + 1)
            case "{":
                return dict(self._members("{}", lambda: self._pair(depth + 1)))
            case character if character and character in "+-.0123456789":
                return self._number()
            case _:
                word = self._word()
                if word not in _WORDS:
                    raise ValueError("a name where a value should be")
                return _WORDS[word]

    def _members(self, brackets: str, read: Callable[[], T]) -> list[T]:
        """Return what `read` finds between two brackets, with commas between."""
        opening, closing = brackets
        self._expect(opening)
        found: list[T] = []
        while self._peek() != closing:
            found.append(read())
            if self._peek() != closing:
                self._expect(",")
        self._expect(closing)
        return found

    def _group(self, depth: int) -> Any:
        """Return a tuple as a list, and a value in brackets as itself: `(1,)` is one, `(1)` not."""
        members = self._members("()", lambda: self._value(depth))
        last = self._place - 2
        while self._text[last] in SPACES:
            last -= 1
        return members[0] if len(members) == 1 and self._text[last] != "," else members

    def _pair(self, depth: int) -> tuple[str, Any]:
        key = self._key()
        self._expect(":")
        return key, self._value(depth)

    def _key(self) -> str:
        return self._string()

    def _string(self) -> str:
        quote = self._peek()
        if quote not in ("'", '"'):
            raise ValueError("no text")
        characters: list[str] = []
        place = self._place + 1
        while place < len(self._text) and self._text[place] != quote:
            character = self._text[place]
            if character == "\\":
                place += 1
                escaped = self._text[place : place + 1]
                character = _ESCAPES.get(escaped, f"\\{escaped}")
                digits = self._text[place + 1 : place + 1 + _CODE_DIGITS.get(escaped, 0)]
                if _is_code(digits, escaped):
                    character = chr(int(digits, 16))
                    place += len(digits)
            characters.append(character)
            place += 1
        self._place = place
        self._expect(quote)
        return "".join(characters)

    def _number(self) -> int | float:
        start = self._place
        while self._place < len(self._text) and self._text[self._place] in "+-.0123456789eE_":
            self._place += 1
        digits = self._text[start : self._place]
        if len(digits) > _MAX_NUMBER_CHARS:
            raise ValueError("a number is too long")
        return float(digits) if any(mark in digits for mark in ".eE") else int(digits)

    def _word(self) -> str:
        self._peek()
        start = self._place
        while self._place < len(self._text) and _is_word(self._text[self._place]):
            self._place += 1
        if start == self._place:
            raise ValueError("no name")
        return self._text[start : self._place]

    def _peek(self) -> str:
        """Return the next character that is no space; "" at the end."""
        while self._place < len(self._text) and self._text[self._place] in SPACES:
            self._place += 1
        return self._text[self._place : self._place + 1]

    def _expect(self, mark: str) -> None:
        if self._peek() != mark:
            raise ValueError(f"no {mark}")
        self._place += 1


def _is_code(digits: str, letter: str) -> bool:
    """Return whether digits behind a backslash and a letter are a character's number."""
    is_whole = len(digits) == _CODE_DIGITS.get(letter)
    return is_whole and set(digits) <= set(hexdigits) and int(digits, 16) <= sys.maxunicode


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()
