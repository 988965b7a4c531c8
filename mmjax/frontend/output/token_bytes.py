"""The bytes of tokens, which may be parts of a character."""

import codecs
import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"
"""What decoding shows for bytes that are no character."""
MAX_CHARACTER_BYTES = 4
"""Of UTF-8."""
_CONTINUATION_BYTES = {bytes([byte]) for byte in range(0x80, 0xC0)}
_Decoder = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BYTE_BY_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""Of byte-level BPE, since GPT-2."""


def find_bytes(tokenizer: Any, token_id: int) -> bytes:
    """Return a token's bytes, whole characters or not."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if REPLACEMENT not in text:
        return text.encode()
    name = tokenizer.convert_ids_to_tokens(token_id) or ""
    byte_token = _BYTE_TOKEN.fullmatch(name)
    if byte_token:
        return bytes([int(byte_token[1], 16)])
    is_byte_level = all(letter in _BYTE_BY_LETTER for letter in name)
    return bytes(_BYTE_BY_LETTER[letter] for letter in name) if is_byte_level else text.encode()


def begins_within(tokenizer: Any, token_id: int) -> bool:
    """Return whether a token's first byte goes on with a character."""
    return find_bytes(tokenizer, token_id)[:1] in _CONTINUATION_BYTES


def split_unfinished(tokenizer: Any, token_ids: Sequence[int]) -> tuple[Sequence[int], str]:
    """Return the tokens before a character whose last bytes are missing, if the text ends so.

    And the characters that the first token of that one begins with.
    """
    # What is there of such a character is three bytes at most.
    pieces = [find_bytes(tokenizer, token_id) for token_id in token_ids[-3:]]
    num_bytes = len(_unfinished_end(b"".join(pieces)))
    num_kept, begin = len(token_ids), b""
    while num_bytes > 0:
        piece = pieces.pop()
        num_kept, begin = num_kept - 1, piece[:-num_bytes]
        num_bytes -= len(piece)
    return token_ids[:num_kept], begin.decode(errors="replace")


class CharacterCounter:
    """Counts the characters of tokens; one of several tokens when its last byte comes."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._decoder = _Decoder("replace")

    def add(self, token: bytes) -> None:
        self.count += len(self._decoder.decode(token))


def _unfinished_end(text: bytes) -> bytes:
    decoder = _Decoder("replace")
    decoder.decode(text)
    return decoder.getstate()[0]
