"""Texts as zod 4 describes them hold: formats, and patterns, of which some look ahead."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import pytest

from mmjax.errors import RequestValueError
from mmjax.frontend.prompt.grammars import GrammarReader
from mmjax.params.sampling_params import StructuredOutputsParams

FORMATS: dict[str, Any] = json.loads(Path(__file__).with_name("zod_formats.json").read_text())
"""By zod's name: what `z.toJSONSchema` of zod 4.6.7 says of it, texts that it takes, and others."""


@pytest.fixture(scope="module")
def reader() -> Iterator[GrammarReader]:
    reader = GrammarReader()
    yield reader
    reader.close()


def matches(grammar: str, value: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    data = json.dumps(value, ensure_ascii=False).encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_of_zod_s_holds(reader: GrammarReader, name: str) -> None:
    case = FORMATS[name]
    grammar = reader.read(StructuredOutputsParams(json={"type": "string", **case["schema"]}))
    assert [one for one in case["right"] if not matches(grammar, one)] == []
    assert [one for one in case["wrong"] if matches(grammar, one)] == []


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("^(?=a|b)[abc]d$", "ad", "cd"),
        (r"^(?=[)\]]|\()(?=.{2}$)[()]+$", ")(", ")()"),
        ("^(?=.*a)[ab]+$", "bba", "bbb"),
    ],
)
def test_a_pattern_that_looks_ahead_at_its_beginning_holds(
    reader: GrammarReader, pattern: str, right: str, wrong: str
) -> None:
    schema = {"type": "string", "pattern": pattern, "allOf": [{"minLength": 2}]}
    grammar = reader.read(StructuredOutputsParams(json=schema))
    assert matches(grammar, right)
    assert not matches(grammar, wrong)


@pytest.mark.parametrize("pattern", ["^(?=a)b|c$", "^(?!a)b$", "a(?=b)", "^(?=a)*b$", "(?=a)b"])
def test_one_that_looks_elsewhere_is_refused_by_name(reader: GrammarReader, pattern: str) -> None:
    with pytest.raises(RequestValueError, match="look-around"):
        reader.read(StructuredOutputsParams(json={"type": "string", "pattern": pattern}))
