"""The law of masks: a token may come if its bytes can go on to an answer that matches, else not.

By brute force, from the vocabulary's texts and a pattern of bytes, without llguidance.
"""

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from transformers import AutoTokenizer

from mmjax.engine.scheduling.logit_rules import Grammars
from mmjax.params.sampling_params import StructuredOutputsParams
from mmjax.params.structured_outputs import make_grammar

ROOT = Path(__file__).parents[2]
TOKENIZERS = {
    "byte fallback": ROOT / "tests/golden/gemma3",
    "byte fallback, a space before": ROOT / "tests/golden/llava",
    "byte level": ROOT / "tests/golden/qwen2_vl",
    "byte fallback, words": ROOT / "checkpoints/tiny_scenes/model",
}
NUM_WALKS, MAX_TOKENS = 4, 10

_CHARACTER = (
    rb"(?:[\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]"
    rb"|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xed[\x80-\x9f][\x80-\xbf]"
    rb"|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})"
)
"""Of UTF-8."""


def json_of(schema: Mapping[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=dict(schema), disable_any_whitespace=True)


def texts(*allowed: str) -> tuple[StructuredOutputsParams, bytes]:
    pattern = b"|".join(regex.escape(text.encode()) for text in allowed)
    return StructuredOutputsParams(choice=allowed), pattern


def pattern(text: str) -> tuple[StructuredOutputsParams, bytes]:
    return StructuredOutputsParams(regex=text), text.encode()


GRAMMARS: dict[str, tuple[StructuredOutputsParams, bytes]] = {
    "one text": texts("hello world"),
    "texts": texts("red", "reddish green", "é✓", " a space", 'a "b"\\', "<0x65>", "▁a"),
    "a letter": pattern("e"),
    "letters": pattern("[a-z ]+"),
    "fixed, then free": pattern("answer: (yes|no[0-9]*)"),
    "ways that meet": pattern("(a|ab)(c|bcd)(d*)"),
    "characters": (StructuredOutputsParams(regex="(?s:.){1,3}"), _CHARACTER + b"{1,3}"),
    "rules": (
        StructuredOutputsParams(grammar='root ::= "(" root ")" | "one" | "two"'),
        rb"(\((?:(?1)|one|two)\)|one|two)",
    ),
    "json": (
        json_of(
            {
                "type": "object",
                "properties": {"name": {"enum": ["x", "yes"]}, "n": {"type": "boolean"}},
                "required": ["name"],
                "additionalProperties": False,
            }
        ),
        rb'\{"name":"(?:x|yes)"(?:,"n":(?:true|false))?\}',
    ),
    "json text": (
        json_of({"type": "string"}),
        rb'"(?:[^"\\\x00-\x1f\x7f-\xff]|(?![\x00-\x7f])'
        + _CHARACTER
        + rb'|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"',
    ),
    "json number": (
        json_of({"type": "integer", "minimum": 0, "maximum": 120}),
        rb"0|[1-9][0-9]?|1[01][0-9]|120",
    ),
    "json with spaces": (
        StructuredOutputsParams(json={"type": "array", "items": {"const": 1}}),
        rb"\[[ \t\r\n]*(?:1(?:[ \t\r\n]*,[ \t\r\n]*1)*[ \t\r\n]*)?\]",
    ),
}


@lru_cache
def load(name: str) -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZERS[name])


@lru_cache
def bytes_by_id(name: str) -> dict[int, bytes]:
    """Return what each token of text stands for; special tokens stand for none."""
    tokenizer = load(name)
    added = tokenizer.added_tokens_decoder
    special = {number for number, token in added.items() if token.special}
    is_byte_level = "ByteLevel" in type(tokenizer.backend_tokenizer.decoder).__name__
    found = {}
    for text, number in tokenizer.get_vocab().items():
        if number in special:
            continue
        if number in added:
            found[number] = text.encode()
        elif is_byte_level:
            found[number] = bytes(_LETTERS.index(letter) for letter in text)
        elif regex.fullmatch("<0x[0-9A-F]{2}>", text):
            found[number] = bytes([int(text[3:5], 16)])
        else:
            found[number] = text.replace("▁", " ").encode()
    return found


def _letters() -> str:
    """Return the letter of each byte in GPT-2's vocabulary (`bytes_to_unicode`)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return "".join(chr(byte if byte in shown else next(hidden)) for byte in range(256))


_LETTERS = _letters()


def find_allowed(name: str, pattern: bytes, prefix: bytes, ends: Sequence[int]) -> set[int]:
    match = regex.compile(pattern).fullmatch
    allowed = {
        number
        for number, text in bytes_by_id(name).items()
        if match(prefix + text, partial=True) is not None
    }
    return allowed | set(ends if match(prefix) else ())


def mask_of(bits: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("structure", GRAMMARS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_exactly_the_tokens_that_can_go_on_may_come(name: str, structure: str) -> None:
    params, pattern = GRAMMARS[structure]
    tokenizer, texts = load(name), bytes_by_id(name)
    ends = [tokenizer.eos_token_id, max(set(range(len(tokenizer))) - set(texts))]
    grammars = Grammars(lambda: tokenizer, len(tokenizer))
    for seed in range(NUM_WALKS):
        chance, prefix = random.Random(seed), b""
        grammar = grammars.start(make_grammar(params), ends)
        for _ in range(MAX_TOKENS):
            allowed = find_allowed(name, pattern, prefix, ends)
            assert mask_of(grammar.allowed_bits) == allowed, prefix
            token_id = chance.choice(sorted(allowed))
            if token_id in ends:
                break
            prefix += texts[token_id]
            grammar.advance(token_id)
    grammars.close()
