"""Control tokens that somebody wrote in a message: they stay text.

A template's text is tokenized with the control tokens that the template wrote. Where a message
holds the text of one, a mark goes through the template in its place, and that text is tokenized
apart, as text:

    "is <eos> red?"  ->  "is 5f0e..x0x red?"  ->  [("<bos>is ", False), ("<eos>", True), ...]
"""

import re
import secrets
from collections.abc import Collection, Iterable
from typing import Any


class ControlTokens:
    """Texts that a tokenizer parses as special tokens, anywhere in a text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(token for token in tokens if token)
        self._lengths = sorted({len(token) for token in self._tokens})
        firsts = "".join(re.escape(char) for char in sorted({t[0] for t in self._tokens}))
        self._starts = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    @classmethod
    def of(cls, tokenizer: Any) -> "ControlTokens":
        """Return a tokenizer's special tokens."""
        added = tokenizer.added_tokens_decoder.values()
        return cls([*tokenizer.all_special_tokens, *(t.content for t in added if t.special)])

    def find(self, text: str, *, allowed: Collection[str] = ()) -> str | None:
        """Return the first control token in `text` except `allowed`, or None."""
        found = self.find_at(text, 0, allowed=allowed)
        return None if found is None else found[1]

    def find_at(
        self, text: str, place: int, *, allowed: Collection[str] = ()
    ) -> tuple[int, str] | None:
        """Return the first control token from `place` on, and where it begins; None: none."""
        for start in self._starts.finditer(text, place):
            for length in self._lengths:
                token = text[start.start() : start.start() + length]
                if token in self._tokens and token not in allowed:
                    return start.start(), token
        return None


class Literals:
    """The control tokens' texts of one conversation, each with its mark."""

    def __init__(self) -> None:
        # Nobody can write a mark in a message, since nobody can guess it.
        self._nonce = secrets.token_hex(12)
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._texts)

    def mark(self, text: str, tokens: ControlTokens, *, allowed: Collection[str] = ()) -> str:
        """Return `text` with a mark in the place of every control token."""
        pieces: list[str] = []
        place = 0
        while (found := tokens.find_at(text, place, allowed=allowed)) is not None:
            start, token = found
            pieces += [text[place:start], f"{self._nonce}x{len(self._texts)}x"]
            self._texts.append(token)
            place = start + len(token)
        return "".join([*pieces, text[place:]]) if pieces else text

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Return the rendered text in pieces, and whether each is to be read as mere text."""
        pieces: list[tuple[str, bool]] = []
        for index, piece in enumerate(re.split(f"{self._nonce}x([0-9]+)x", rendered)):
            text = self._texts[int(piece)] if index % 2 else piece
            if text:
                pieces.append((text, bool(index % 2)))
        return pieces
