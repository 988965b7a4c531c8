"""Grammars are read in a process of their own: what is wrong with one is a 400 that names it."""

import json
import random
import string
from collections.abc import Iterator
from typing import Any

import llguidance
import pytest

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.frontend.prompt.grammars import GrammarReader
from mmjax.params.sampling_params import StructuredOutputsParams
from mmjax.params.structured_outputs import FORMATS

NUM_BAD = 60
NUM_BAD_SLOW = 1000


@pytest.fixture(scope="module")
def reader() -> Iterator[GrammarReader]:
    reader = GrammarReader(cpu_seconds=0.5)
    yield reader
    reader.close()


def chain(length: int) -> dict[str, Any]:
    """Return a schema whose definitions each hold the next."""
    links: dict[str, Any] = {
        f"{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{n + 1}"}}}
        for n in range(length)
    }
    return {"$defs": {**links, f"{length}": {"type": "string"}}, "$ref": "#/$defs/0"}


DEADLY = {
    "crashes": {"grammar": "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(4500))},
    "crashes by a schema": {"json": chain(850)},
    "takes minutes": {
        "json": {
            "type": "object",
            "patternProperties": {f"^a{n}.*b{n}$": {"type": "string"} for n in range(1000)},
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("given", DEADLY.values(), ids=DEADLY)
def test_CVE_2025_48942_what_kills_the_process_is_refused(
    reader: GrammarReader, given: dict[str, Any]
) -> None:
    params = StructuredOutputsParams(**given)
    with pytest.raises(RequestValueError, match="too large or too deep") as caught:
        reader.read(params)
    assert caught.value.param == f"structured_outputs.{params.kind}"
    assert reader.read(StructuredOutputsParams(choice=["a", "b"]))
    process = reader._workers._workers[0].process
    with pytest.raises(RequestValueError, match="too large"):
        reader.read(params)
    assert reader._workers._workers[0].process is process, "it is known, and not read again"


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "(a+)+b"},
        {"regex": "a{1,1000000}"},
        {"regex": "(a{1,1000}){1,1000}"},
        {"json": {"type": "array", "minItems": 10**6, "items": {"type": "string"}}},
        {"json": {}},
        {"json": "true"},
        {"json_object": True, "disable_any_whitespace": True},
        {"json": {"type": "object"}, "whitespace_pattern": " ?"},
        {"choice": ['"', "\\", "a|b", "/x/", "\n", "é✓", "\x01"]},
        {"grammar": 'root ::= "a" | "b" root'},
        {"grammar": 'start: A+\nA: "x"'},
        {"grammar": '?start: select\n?select: "SELECT " NAME\nNAME: /[a-z]+/'},
    ],
    ids=str,
)
def test_CVE_2026_55574_what_can_be_read_becomes_a_grammar(
    reader: GrammarReader, given: dict[str, Any]
) -> None:
    assert reader.read(StructuredOutputsParams(**given))


def test_objects_are_closed_where_it_is_asked(reader: GrammarReader) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    closed = reader.read(StructuredOutputsParams(json=schema, disable_additional_properties=True))
    assert closed.count('"additionalProperties": false') == 2
    assert "additionalProperties" not in reader.read(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    "written",
    [
        {"format": "password"},
        {"format": "int64"},
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},
        {"anyOf": [{"not": {}}, {"type": "string"}]},
        {"$defs": {"P": {"format": "path"}}, "$ref": "#/properties/format/$defs/P"},
        {"items": [{"format": "binary"}]},
    ],
    ids=str,
)
def test_what_forbids_nothing_is_no_reason_to_refuse(
    reader: GrammarReader, written: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"format": written, "not": {}}}
    assert reader.read(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_are_known_hold(reader: GrammarReader, name: str) -> None:
    text = reader.read(StructuredOutputsParams(json={"type": "string", "format": name}))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), text)
    assert matcher.try_consume_tokens(list(b'"(')) == 1


@pytest.mark.parametrize(
    "written",
    [
        {"uniqueItems": True},
        {"not": {"type": "string"}},
        {"propertyNames": {"pattern": "^a"}},
        {"if": {}, "then": {"minLength": 1}},
    ],
    ids=str,
)
def test_what_would_not_hold_is_refused(reader: GrammarReader, written: dict[str, Any]) -> None:
    with pytest.raises(RequestValueError, match="Unimplemented keys"):
        reader.read(StructuredOutputsParams(json={"properties": {"a": written}}))


RECORD = {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}
ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
BY_NAME = {"$defs": {"C": {"enum": ["a"], "title": "C", "type": "string"}}, "type": "object"}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "object", **RECORD}, ["{}", '{"a": 1, "b": 2}'], ['{"c": 1}', '{"a": "x"}']),
        (
            {"type": "object", **RECORD, "properties": {"b": {"type": "string"}, "c": {}}},
            ['{"b": "x", "a": 1}'],
            ['{"b": 1}', '{"c": 1}'],
        ),
        ({"type": "object", **RECORD, "required": ["b"]}, ['{"b": 1}'], ['{"a": 1}']),
        (
            BY_NAME | {"anyOf": [RECORD | {"propertyNames": {"$ref": "#/$defs/C"}}]},
            ['{"a": 1}'],
            ['{"b": 1}'],
        ),
        (
            {
                "anyOf": [{"type": "object", **RECORD}, {"type": "null"}],
                "items": RECORD | {"propertyNames": {"$ref": "#/anyOf/0/propertyNames"}},
            },
            ['{"a": 1}'],
            ['{"c": 1}'],
        ),
        (
            {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
            ['"a.b\'c@x-y.org"', '"a@b.c.de"'],
            ['".a@x.org"', '"a..b@x.org"', '"a\'@x.org"', '"a.@x.org"', '"a@x"', '"a@x..org"'],
        ),
    ],
    ids=["record", "record with properties", "required", "by name", "of a list", "email"],
)
def test_records_of_an_enum_and_the_email_of_zod_hold(
    reader: GrammarReader, schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    text = reader.read(StructuredOutputsParams(json=schema))

    def matches(answer: str) -> bool:
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), text)
        data = answer.encode()
        return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()

    assert [*map(matches, right)] == [True] * len(right)
    assert [*map(matches, wrong)] == [False] * len(wrong)


@pytest.mark.parametrize(
    "names",
    [{"enum": ["a", 1]}, {"enum": ["1"], "type": "integer"}, {"$ref": "#/$defs/X"}],
    ids=str,
)
def test_names_that_are_no_texts_of_an_enum_are_refused(
    reader: GrammarReader, names: dict[str, Any]
) -> None:
    with pytest.raises(RequestValueError, match="propertyNames"):
        reader.read(StructuredOutputsParams(json={"propertyNames": names}))


def test_a_schema_may_ask_to_have_unknown_keywords_ignored(reader: GrammarReader) -> None:
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    assert reader.read(StructuredOutputsParams(json=schema))


def test_data_of_a_schema_stays(reader: GrammarReader) -> None:
    data = {"format": "path", "uniqueItems": False, "not": {}}
    text = reader.read(StructuredOutputsParams(json={"const": data, "enum": [data]}))
    assert text.count(json.dumps(data)) == 2


def test_a_schema_may_say_itself_that_json_has_no_white_space(reader: GrammarReader) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    assert '"whitespace_flexible": false' in reader.read(StructuredOutputsParams(json=schema))
    for given in ({"type": "object"}, schema | {"x-guidance": {"whitespace_flexible": True}}):
        strict = StructuredOutputsParams(json=given, disable_any_whitespace=True)
        assert '"whitespace_flexible": false' in reader.read(strict)
        assert '"whitespace_flexible": true' in reader.read(StructuredOutputsParams(json=given))


def test_errors_name_the_field_and_are_short(reader: GrammarReader) -> None:
    with pytest.raises(RequestValueError) as caught:
        reader.read(StructuredOutputsParams(regex="(" * 60_000))
    assert caught.value.param == "structured_outputs.regex"
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message


def bad(chance: random.Random) -> dict[str, Any]:
    """Return something that is no structure, or hardly one."""
    junk = "".join(chance.choices(string.printable, k=chance.randint(1, 60)))
    broken = {
        "type": chance.choice(["colour", 3, None, ["x"], {}]),
        chance.choice(["minLength", "maxItems", "pattern", "$ref", "properties", "required"]): (
            chance.choice([-1, "((", {"a": 1}, [1], "#/nowhere", "http://127.0.0.1/a", 1e400])
        ),
    }
    return chance.choice(
        [
            {"json": junk},
            {"json": broken},
            {"json": {"type": "object", "properties": {"a": broken}}},
            {"json": {"allOf": [{"$ref": "#"}, broken]}},
            {"regex": "(" + junk},
            {"regex": "(?=" + junk.replace("\\", "") + ")"},
            {"grammar": junk},
            {"grammar": "start: " + junk},
            {"grammar": f"root ::= {junk} undefined"},
        ]
    )


@pytest.mark.parametrize(
    "number", [NUM_BAD, pytest.param(NUM_BAD_SLOW, marks=pytest.mark.slow)], ids=str
)
def test_CVE_2025_48942_bad_ones_are_refused_and_the_next_is_read(
    reader: GrammarReader, number: int
) -> None:
    chance = random.Random(number)
    params: list[str] = []
    for _ in range(number):
        try:
            reader.read(StructuredOutputsParams(**bad(chance)))
        except (RequestValueError, RequestTypeError) as error:
            params.append(error.param or "")
    assert len(params) > 0.8 * number
    assert {param.partition(".")[0] for param in params} == {"structured_outputs"}
    assert reader.read(StructuredOutputsParams(regex="a+"))


@pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=pytest.mark.slow)], ids=str)
def test_CVE_2025_29770_what_is_kept_is_bounded(reader: GrammarReader, number: int) -> None:
    for n in range(number):
        reader.read(StructuredOutputsParams(json={"type": "string", "const": f"{n}" * 50}))
    known = reader._known
    assert known.currsize <= known.capacity
    assert len(known) <= known.capacity // 1024
