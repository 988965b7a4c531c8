"""Incremental detokenization, and stop strings.

Returned text is final: a character with missing bytes is held back, and so is text that may be the
beginning of a stop string. A text that ends inside a character ends before it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from mmjax.frontend.output.token_bytes import REPLACEMENT, split_unfinished

_MAX_PENDING_TOKENS = 32
"""Ids that are held back for a character's last byte; longer runs are not valid UTF-8."""


class TokenDecoder:
    """Decodes the ids of all sequences by one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self._backend = _find_backend(tokenizer)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids, with its spaces as they are."""
        if not ids:
            return ""
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def _find_backend(tokenizer: Any) -> Any:
    """Return what HF's `decode` calls in the end, if this tokenizer's does nothing else.

    For a token or two the conversions around it take three times as long.
    """
    kind = type(tokenizer)
    is_plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerFast.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    )
    return tokenizer.backend_tokenizer if is_plain else None


class IncrementalDetokenizer:
    """Detokenizes one sequence.

    The last piece's ids are decoded again with each new id, and the difference is returned:
    spaces and byte tokens are decoded depending on the tokens before.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._silent_ids = decoder.special_ids if skip_special_tokens else frozenset[int]()
        self._ids = list(context)
        self._num_read = len(self._ids)
        self._text_read = self._whole_text()
        """The text of the ids that were read."""

    def append(self, token_id: int) -> str:
        """Add an id; return the new text that is final."""
        if token_id in self._silent_ids:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)[len(self._text_read) :]
        # Empty: a space that is decoded with the next word, or a character's first bytes.
        is_incomplete = not text or text.endswith(REPLACEMENT)
        if is_incomplete and len(self._ids) - self._num_read < _MAX_PENDING_TOKENS:
            return ""
        self._read()
        return text

    def flush(self) -> str:
        """Return the text held back, up to a character whose last bytes are missing."""
        if len(self._ids) == self._num_read:
            return ""
        text = self._whole_text()[len(self._text_read) :]
        self._read()
        return text

    def _read(self) -> None:
        self._ids = self._ids[self._num_read :]
        self._num_read = len(self._ids)
        self._text_read = self._decode(self._ids)

    def _whole_text(self) -> str:
        if not self._ids:
            return ""
        token_ids, begin = split_unfinished(self._decoder.tokenizer, self._ids)
        return self._decode(token_ids) + begin

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens)


class StopChecker:
    """Finds the first stop string, and holds back text that may be the beginning of one.

    Linear in the text's length for any stop strings, which clients choose.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._borders = tuple(map(_borders, self._stop))
        self._num_matched = [0] * len(self._stop)
        """Length of each stop string's longest prefix that the text ends with."""
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that is final, and the stop string that ends it, or None.

        Without `may_stop` no stop string ends within `text`; one may begin there.
        """
        if not self._stop:
            return text, None
        for place, character in enumerate(text):
            found = self._advance(character)
            if found is not None and may_stop:
                shown = self._held + text[: place + 1]
                self._held = ""
                return shown if self._include_in_output else shown[: -len(found)], found
        held = self._held + text
        num_shown = len(held) - max(self._num_matched)
        self._held = held[num_shown:]
        return held[:num_shown], None

    def release(self) -> str:
        """Return the text held back, at the end of the sequence."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Advance by a character; return the longest stop string that ends with it."""
        found: str | None = None
        for index, stop in enumerate(self._stop):
            matched, borders = self._num_matched[index], self._borders[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = max(found or "", stop, key=len)
                matched = borders[matched - 1]
            self._num_matched[index] = matched
        return found


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """Return the failure function of Knuth, Morris and Pratt: "abab" -> 0 0 1 2."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = borders[length - 1]
        if stop[place] == stop[length]:
            length += 1
        borders[place] = length
    return tuple(borders)


class OutputText:
    """The text of one completion: a detokenizer with stop strings."""

    def __init__(self, detokenizer: IncrementalDetokenizer, checker: StopChecker) -> None:
        self._detokenizer = detokenizer
        self._checker = checker
        self.text = ""
        self.stop_string: str | None = None

    def append(self, token_id: int, *, check_stop: bool = True) -> str:
        """Add an id; return the new text.

        Without `check_stop` no stop string ends here; one may begin.
        """
        return self._show(self._detokenizer.append(token_id), check_stop=check_stop)

    def finish(self, *, check_stop: bool = True) -> str:
        """Return the rest of the text, at the end of the sequence."""
        shown = self._show(self._detokenizer.flush(), check_stop=check_stop)
        if self.stop_string is None:
            rest = self._checker.release()
            self.text += rest
            shown += rest
        return shown

    def _show(self, text: str, *, check_stop: bool) -> str:
        text, self.stop_string = self._checker.push(text, may_stop=check_stop)
        self.text += text
        return text
