"""Parsers of tool calls: every format, whole and in pieces, and what is no call."""

import ast
import json
import random
import string
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.config.server_config import ToolCallParserName
from mmjax.frontend.output.tool_calls import parsers
from mmjax.frontend.output.tool_calls.deltas import CallParser
from mmjax.frontend.output.tool_calls.parsers import (
    TOOL_CALL_FORMATS,
    NamedCallParser,
    required_call_parser,
)
from mmjax.frontend.output.tool_calls.python_literals import LiteralReader

FUNCTIONS: dict[str, Any] = {
    "f": {"parameters": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}},
    "g": {},
    "get_weather": {},
}
F, G = ("f", '{"a": 1}'), ("g", "{}")

SECTION = "<|tool_calls_section_begin|>"


def kimi(*said: str) -> str:
    """Return a section of Kimi's, of ids and arguments in turn."""
    calls = zip(said[::2], said[1::2], strict=True)
    written = (
        f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for call_id, arguments in calls
    )
    return f"{SECTION}{''.join(written)}<|tool_calls_section_end|>"


SAID: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "", [F]),
    ("hermes", 'so:\n<tool_call>\n{"name":"g"}\n</tool_call>\nend', "so:\nend", [G]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>"}}', "",
     [("f", '{"a": "}</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
    ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ("hermes", '<tool_call>{"name": "f", arguments: {"a": 1}}</tool_call>',
     '<tool_call>{"name": "f", arguments: {"a": 1}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>\nend', "\nend", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "b": so}, c</tool_call>',
     "c</tool_call>", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "b" c}</tool_call>',
     ', "b" c}</tool_call>', [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ["a", 1]}</tool_call>', "",
     [("f", '["a", 1]')]),
    ("hermes", '<tool_call>{"name": "g", "arguments": ""}</tool_call>', "", [G]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "parameters": "{}", "name": "f"}</tool_call>',
     "", [F]),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", "<tool_call>nothing", "<tool_call>nothing", []),
    ("hermes", "the <tool_call> mark\n<tool_call>", "the <tool_call> mark\n<tool_call>", []),
    ("hermes", " spaced \n", " spaced \n", []),
    ("internlm", 'ok<|action_start|><|plugin|>\n{"name":"f","parameters":{"a": 1}}<|action_end|>',
     "ok", [F]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g"}', "",
     [F, G]),
    ("llama3_json", '```json\n{"name": "f", "parameters": {"a": 1}}\n```', "", [F]),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3_json", '[{"color": "red"}]', '[{"color": "red"}]', []),
    ("llama3_json", 'it is {"name": "f"}', 'it is {"name": "f"}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', "", [F, G]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', "", [F, G]),
    ("mistral", '[TOOL_CALLS]2fa-x.y{"a": 1}', "", [("2fa-x.y", '{"a": 1}')]),
    ("mistral", "[TOOL", "[TOOL", []),
    ("mistral", "[TOOL_CALLS]f no", "[TOOL_CALLS]f no", []),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
     "", [F]),
    ("glm45", "so:\n<tool_call>g\n</tool_call>\nend", "so:\nend", [G]),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>\n"
     "<tool_call>g</tool_call>", "", [F, G]),
    ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
     '<arg_value>[1, {"c": null}]</arg_value>\n<arg_key>d</arg_key>\n<arg_value>a "b"\n</arg_value>'
     "</tool_call>", "", [("f", '{"s": "1", "b": [1, {"c": null}], "d": "a \\"b\\"\\n"}')]),
    ("glm45", "<tool_call>f\n<arg_key>a</arg_key></tool_call>",
     "<tool_call>f\n<arg_key>a</arg_key></tool_call>", []),
    ("glm45", "<tool_call>f\n<arg_key>a", "<tool_call>f\n<arg_key>a", []),
    ("glm45", " \n<tool_call></tool_call>", " \n<tool_call></tool_call>", []),
    ("glm45", "a < b <tool", "a < b <tool", []),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
     "</tool_call>", "", [F]),
    ("qwen3_coder", "so:\n<tool_call>\n<function=g>\n</function>\n</tool_call>\n<tool_call>\n"
     "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "so:", [G, F]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\n<parameter=d>\n"
     ' a\n\n</parameter>\n<parameter=b>\n[1, null]\n</parameter>\n</function>\n</tool_call>', "",
     [("f", '{"s": "1", "d": " a\\n", "b": [1, null]}')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
     "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", []),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>",
     "<tool_call>\n<function=f>\n</tool_call>", []),
    ("qwen3_coder", "<tool_call>\n<function=f>no<parameter=a>1</parameter></function></tool_call>",
     "<tool_call>\n<function=f>no<parameter=a>1</parameter></function></tool_call>", []),
    ("lfm2", "<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>", "", [F, G]),
    ("lfm2", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>I ask.", "I ask.", [F]),
    ("lfm2", "I ask.\n<|tool_call_start|>[f(a=1)]<|tool_call_end|>", "I ask.", [F]),
    ("lfm2", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>\n<|tool_call_start|>[g()]"
     "<|tool_call_end|>a <|", "a <|", [F, G]),
    ("lfm2", "so: <|tool_call_start|>[see](here)", "so: <|tool_call_start|>[see](here)", []),
    ("lfm2", "so: <|tool_call_start|>[f(a", "so: <|tool_call_start|>[f(a", []),
    ("lfm2", "so: <|tool_call_start|>[f", "so: <|tool_call_start|>[f", []),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>",
     "<|tool_call_start|>[f(1)]<|tool_call_end|>", []),
    ("lfm2", "[f(a=1)]", "[f(a=1)]", []),
    ("gemma4", "<|tool_call>call:f{a:1}<tool_call|>", "", [F]),
    ("gemma4", "so <|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>", "so",
     [F, G]),
    ("gemma4", '<|tool_call>call:f{s:<|"|>it "is", {so}:\n<|"|>,d:[1,-2.5,true,null],'
     'e:{two words:<|"|><|"|>,<|"|>k<|"|>:false}}<tool_call|>', "",
     [("f", '{"s": "it \\"is\\", {so}:\\n", "d": [1, -2.5, true, null], '
       '"e": {"two words": "", "k": false}}')]),
    ("gemma4", "<|tool_call>call:f{a:1<tool_call|>", "<|tool_call>call:f{a:1<tool_call|>", []),
    ("gemma4", "<|tool_call>f{a:1}<tool_call|>", "<|tool_call>f{a:1}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:f{a:1} b<tool_call|>",
     "<|tool_call>call:f{a:1} b<tool_call|>", []),
    ("gemma4", '<|tool_call>call:f{a:<|"|>b}<tool_call|>',
     '<|tool_call>call:f{a:<|"|>b}<tool_call|>', []),
    ("kimi_k2", kimi("functions.f:0", '{"a": 1}'), "", [F]),
    ("kimi_k2", "so " + kimi("functions.f:7", '{"a": 1}', "functions.g:8", " ") + " end", "so end",
     [F, ("g", " {}")]),
    ("kimi_k2", kimi("functions.f:0", '{"a": 1}') + kimi("g:1", "{}"), "", [F, G]),
    ("kimi_k2", kimi("functions.f.x:0", "{}"), "", [("f.x", "{}")]),
    ("kimi_k2", kimi("functions.f:0", '{"a": "<|tool"}'), "", [("f", '{"a": "<|tool"}')]),
    ("kimi_k2", SECTION, SECTION, []),
    ("kimi_k2", kimi(), kimi(), []),
    ("kimi_k2", f"{SECTION} no", f"{SECTION} no", []),
    ("kimi_k2", kimi("f g", "{}"), kimi("f g", "{}"), []),
    ("kimi_k2", f"{SECTION}<|tool_call_begin|>functions.f",
     f"{SECTION}<|tool_call_begin|>functions.f", []),
    ("kimi_k2", f'{SECTION}<|tool_call_begin|>f:0<|tool_call_argument_begin|>{{"a": ', "",
     [("f", '{"a": ')]),
    ("kimi_k2", "a < b <|tool", "a < b <|tool", []),
    ("pythonic", "[f(a=1), g()]", "", [F, G]),
    ("pythonic", "[ g () , f (a=1)]", "", [G, F]),
    ("lfm2", "<|tool_call_start|>[g(), f(a=1)]<|tool_call_end|>", "", [G, F]),
    ("pythonic", "```tool_code\nf(a=1)\n```", "", [F]),
    ("pythonic", '[f(a="x,)]", b=[1, {"c": None}])]', "",
     [("f", '{"a": "x,)]", "b": [1, {"c": null}]}')]),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=b)]", "[f(a=b)]", []),
    ("pythonic", "[see](here)", "[see](here)", []),
    ("pythonic", "f(a=1)", "f(a=1)", []),
]  # fmt: skip


def read(
    parser: CallParser, text: str, seed: int | None = None
) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls of an answer that comes whole, or in pieces by `seed`."""
    chooser = random.Random(seed)
    pieces, place = [], 0
    while place < len(text):
        size = len(text) if seed is None else chooser.choice([1, 1, 2, 3, 7])
        pieces.append(text[place : place + size])
        place += size
    return read_pieces(parser, pieces)


def read_pieces(parser: CallParser, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    shown, calls = "", []
    for delta in [*map(parser.push, pieces), parser.finish()]:
        shown += delta.text
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return shown, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(("name", "said", "text", "calls"), SAID)
def test_formats(
    name: str, said: str, text: str, calls: list[tuple[str, str]], seed: int | None
) -> None:
    assert read(TOOL_CALL_FORMATS[name].make(FUNCTIONS), said, seed) == (text, calls)


@pytest.mark.parametrize(("name", "said", "text", "calls"), SAID)
def test_a_piece_may_end_anywhere(
    name: str, said: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for end in range(len(said) + 1):
        pieces = [said[:end], said[end:]]
        read = read_pieces(TOOL_CALL_FORMATS[name].make(FUNCTIONS), pieces)
        assert read == (text, calls), pieces


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        ("pythonic", r'[f(s="\ud83d\ude00")]', ("f", '{"s": "\U0001f600"}')),
        ("pythonic", r'[f(s="a\ud83d")]', ("f", '{"s": "a\ufffd"}')),
        (
            "qwen3_coder",
            '<tool_call><function=f><parameter=b>"\\ud83d"</parameter></function></tool_call>',
            ("f", '{"b": "\ufffd"}'),
        ),
        (
            "glm45",
            '<tool_call>f<arg_key>b</arg_key><arg_value>["\\ud83d"]</arg_value></tool_call>',
            ("f", '{"b": ["\ufffd"]}'),
        ),
        (
            "hermes",
            r'<tool_call>{"name": "f", "arguments": "{\"s\": \"\ud83d\"}"}</tool_call>',
            ("f", '{"s": "\ufffd"}'),
        ),
        ("hermes", r'<tool_call>{"name": "f\ud83d"}</tool_call>', ("f\ufffd", "{}")),
    ],
)
def test_halves_of_surrogate_pairs_are_no_part_of_calls(
    name: str, said: str, expected: tuple[str, str]
) -> None:
    assert read(TOOL_CALL_FORMATS[name].make(FUNCTIONS), said) == ("", [expected])


def test_every_format_can_be_set() -> None:
    assert set(get_args(ToolCallParserName)) == TOOL_CALL_FORMATS.keys()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_enforced_calls(seed: int | None) -> None:
    said = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert read(required_call_parser(), said, seed) == ("", [F, G])
    assert read(NamedCallParser("f"), '{"a": 1}', seed) == ("", [F])


MARKS = [
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *(SECTION, "<|tool_calls_section_end|>", "<|tool_call_begin|>functions.f:0"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|tool_call>", "<tool_call|>", "call:", '<|"|>'),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```", "```json"),
    *(
        "```tool_code",
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        '{"name": "f"',
        '"arguments"',
    ),
    *(
        '{"a": 1}',
        ":",
        ",",
        "}",
        "]",
        "[",
        "{",
        "(",
        ")",
        "f(",
        "a=1",
        '"',
        "\\",
        "'",
        " ",
        "\n",
        "f",
    ),
]


@given(
    name=st.sampled_from(sorted(TOOL_CALL_FORMATS)),
    said=st.lists(st.sampled_from([*MARKS, *string.ascii_lowercase[:4]]), max_size=30).map("".join),
    seed=st.integers(0, 10**6),
)
def test_pieces_are_read_as_the_whole_is(name: str, said: str, seed: int) -> None:
    whole = read(TOOL_CALL_FORMATS[name].make(FUNCTIONS), said)
    assert read(TOOL_CALL_FORMATS[name].make(FUNCTIONS), said, seed) == whole
    if not whole[1] and not any(mark in said for mark in ("</tool_call>", "<|action_end|>", "```")):
        assert whole[0] == said


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TOOL_CALL_FORMATS))
@pytest.mark.parametrize("piece", ["[", " ", "{", '{"a":', "<tool_call>", "f(", '"', "\\"])
def test_CVE_2026_55574_long_answers_are_read_in_one_pass(name: str, piece: str) -> None:
    """A reader that went back over what it read would take hours."""
    parser = TOOL_CALL_FORMATS[name].make(FUNCTIONS)
    num_chars = sum(len(parser.push(piece).text) for _ in range(200_000))
    assert num_chars + len(parser.finish().text) <= 200_000 * len(piece)


def test_CVE_2026_55574_no_reader_of_calls_uses_a_pattern() -> None:
    """Patterns of parsers of calls went back over hostile answers: here they read on, only."""
    folder = Path(parsers.__file__).parent
    files = sorted(folder.glob("*.py"))
    assert len(files) > 3
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            assert "re" not in names, file


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def parse_arguments(text: str) -> dict[str, object]:
    return LiteralReader(text).arguments()


@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), VALUES, max_size=3))
def test_python_literals_are_read_as_json_too(arguments: dict[str, object]) -> None:
    text = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments.items())
    assert json.dumps(parse_arguments(text)) == json.dumps(arguments)


def test_brackets_around_a_value_make_no_list_of_it() -> None:
    said = "a=(1), b=('x' ), c=(1,), d=(2, 3), e=(), f=(((4)), [5]), g=(',')"
    expected = {"a": 1, "b": "x", "c": [1], "d": [2, 3], "e": [], "f": [4, [5]], "g": ","}
    assert parse_arguments(said) == expected


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize(
    "text", [r"\d+\.\w", r"\xe9\u00e9\U0001F600", "a\\\nb", r"\'\"\\\n\t\v\a"], ids=str
)
@pytest.mark.filterwarnings("ignore:.*invalid escape sequence")
def test_a_backslash_means_what_it_does_in_python(text: str, quote: str) -> None:
    said = f"{quote}{text}{quote}"
    assert parse_arguments(f"s={said}") == {"s": ast.literal_eval(said)}


@pytest.mark.parametrize("text", [r"C:\Users\x", r"\u12", r"\UFFFFFFFF", r"\x+1"])
def test_a_backslash_that_python_refuses_stands_for_itself(text: str) -> None:
    assert parse_arguments(f"s='{text}', a=1") == {"s": text, "a": 1}


@given(st.text(alphabet="fa=1,()[]{}'\"\\:-+. \nNone", max_size=40))
def test_any_text_is_arguments_or_an_error(text: str) -> None:
    with suppress(ValueError):
        assert isinstance(parse_arguments(text), dict)


@pytest.mark.parametrize("text", ["a=" + "[" * 10**5, "a=" + "-" * 10**5, "a=" + "9" * 10**5])
def test_deep_and_long_literals_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested|name|number|int"):
        parse_arguments(text)
