"""Token ids to text as they come, and the stop strings in it.

What is given out is never taken back: a character whose bytes are incomplete waits, and so does
text that may yet become a stop string.
"""

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"

_MAX_PENDING_TOKENS = 32
"""Ids that may wait for a character's last byte; longer runs are bytes that no text ends."""


class IncrementalDetokenizer:
    """The text of one growing sequence.

    The ids of the last piece are decoded again with each new one, and only the difference is
    given out: tokenizers put spaces and join bytes depending on what stands before.
    """

    def __init__(
        self, tokenizer: Any, *, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._silent_ids = frozenset(tokenizer.all_special_ids if skip_special_tokens else ())
        self._ids = list(context)
        self._num_read = len(self._ids)

    def append(self, token_ids: Sequence[int]) -> str:
        """Take new ids; return the text that is certain by now."""
        return "".join([self._append_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return what still waits: incomplete bytes as replacement characters."""
        text = self._new_text()
        self._num_read = len(self._ids)
        return text

    def _append_one(self, token_id: int) -> str:
        if token_id in self._silent_ids:
            return ""
        self._ids.append(token_id)
        text = self._new_text()
        # No text yet: a space that shows with the next word, or the first bytes of a character.
        is_incomplete = not text or text.endswith(_REPLACEMENT)
        if is_incomplete and len(self._ids) - self._num_read < _MAX_PENDING_TOKENS:
            return ""
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._ids[: self._num_read])
        return self._decode(self._ids)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return self._tokenizer.decode(
            ids,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )


class StopChecker:
    """Holds text back while it may become a stop string, and finds the first one."""

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may go out, and the stop string that ends it, if one does."""
        if not self._stop:
            return text, None
        held = self._held + text
        found = self._first_match(held)
        if found is not None:
            start, stop = found
            self._held = ""
            return held[: start + len(stop) if self._include_in_output else start], stop
        keep = max(_longest_overlap(held, stop) for stop in self._stop)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def release(self) -> str:
        """Return what is held back, when the sequence ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        # The match that ends first is the one that a reader token by token would have met.
        matches = [(text.find(stop), stop) for stop in self._stop if stop in text]
        return min(matches, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)


def _longest_overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class OutputText:
    """Detokenizer and stop strings together: the visible text of one completion."""

    def __init__(self, detokenizer: IncrementalDetokenizer, checker: StopChecker) -> None:
        self._detokenizer = detokenizer
        self._checker = checker
        self.text = ""
        self.stop_string: str | None = None

    def append(self, token_ids: Sequence[int], *, check_stop: bool = True) -> str:
        """Take new ids; return what may be shown beyond what was shown before."""
        text = self._detokenizer.append(token_ids)
        return self._show(text, check_stop=check_stop)

    def finish(self) -> str:
        """Return the rest, when the engine ended the sequence."""
        shown = self._show(self._detokenizer.flush(), check_stop=True)
        if self.stop_string is None:
            rest = self._checker.release()
            self.text += rest
            shown += rest
        return shown

    def _show(self, text: str, *, check_stop: bool) -> str:
        if check_stop:
            text, self.stop_string = self._checker.push(text)
        self.text += text
        return text
