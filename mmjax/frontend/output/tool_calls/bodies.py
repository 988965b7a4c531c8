r"""Tool calls between two marks, each read as one when its closing mark is there.

GLM-4.5's `<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>`; Qwen3.5's
`<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>`; and
Gemma 4's `<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>`.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from mmjax.frontend.output.reasoning import find_overlap
from mmjax.frontend.output.tool_calls.deltas import SPACES, MarkedCallParser
from mmjax.frontend.output.tool_calls.json_scanner import MAX_NAME_CHARS
from mmjax.frontend.output.tool_calls.python_literals import LiteralReader
from mmjax.params.structured_outputs import find_schema

_MAX_BODY_CHARS = 2**18

Functions = Mapping[str, Mapping[str, Any]]
"""Name -> function, as OpenAI's `tools` have it."""
Call = tuple[str, dict[str, Any]]
"""A function's name, and its arguments."""


class BodyCallParser(MarkedCallParser):
    """Calls between `start` and `end`, of what `read` makes of the text between them."""

    def __init__(self, *, start: str, end: str, read: Callable[[str], Call]) -> None:
        """`read`: the text between the marks -> a call; ValueError: it is none, but text."""
        super().__init__(start)
        self._mark, self._read_body = end, read
        self._body: list[str] = []
        self._num_chars = 0

    def _end(self) -> None:
        if self._opening:
            self._give_up(self._held)
        elif not self._num_calls or self._held.strip(SPACES):
            self._delta.add_text(self._held)

    def _read_marked(self, text: str, place: int) -> int:
        found = text.find(self._mark, place)
        stop = found if found >= 0 else len(text) - find_overlap(text[place:], self._mark)
        self._body.append(text[place:stop])
        self._num_chars += stop - place
        if self._num_chars > _MAX_BODY_CHARS:
            self._give_up("")
            return stop
        if found < 0:
            self._held = text[stop:]
            return len(text)
        try:
            name, arguments = self._read_body("".join(self._body))
            shown = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            self._give_up(self._mark)
            return found + len(self._mark)
        self._delta.add_call(self._num_calls, name=name, arguments=shown)
        self._num_calls += 1
        self._end_call()
        return found + len(self._mark)

    def _give_up(self, rest: str) -> None:
        self._refuse("".join(self._body) + rest)
        self._end_call()

    def _end_call(self) -> None:
        self._opening, self._body, self._num_chars = "", [], 0
        self._read = self._read_text


def _check_name(name: str) -> str:
    if not 0 < len(name) <= MAX_NAME_CHARS or any(mark in name for mark in "<>{}\n"):
        raise ValueError("no name of a function")
    return name


# ---- GLM-4.5 -------------------------------------------------------------------------------------

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


def read_glm_call(body: str, functions: Functions) -> Call:
    """Read GLM-4.5's; a value is JSON, unless its function says that it is a text."""
    head, *parts = body.split(_KEY)
    name = _check_name(head.strip(SPACES))
    types = _find_argument_types(name, functions)
    arguments: dict[str, Any] = {}
    for part in parts:
        key, mark, rest = part.partition(_KEY_END)
        value, end, behind = rest.lstrip(SPACES).removeprefix(_VALUE).rpartition(_VALUE_END)
        is_whole = mark and end and rest.lstrip(SPACES).startswith(_VALUE)
        if not is_whole or behind.strip(SPACES):
            raise ValueError("an argument without its value")
        key = key.strip(SPACES)
        arguments[key] = _read_value(value, types.get(key, _ANY))
    return name, arguments


_Types = frozenset[str]
"""Those that a value may have."""
_ANY = _Types()
_TYPES = {
    **{bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"},
    **{str: "string", type(None): "null"},
}


def _find_argument_types(name: str, functions: Functions) -> Mapping[str, _Types]:
    """Return the types of a function's arguments."""
    parameters = functions.get(name, {}).get("parameters") or {}
    reference = parameters.get("$ref")
    whole = find_schema(parameters, reference) if isinstance(reference, str) else parameters
    properties = whole.get("properties") if isinstance(whole, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    known: dict[str, _Types] = {}
    return {key: _find_types(one, parameters, known) for key, one in properties.items()}


def _read_value(text: str, types: _Types) -> Any:
    if types == {"string"}:
        return text
    try:
        value = _load(text)
    except ValueError:
        return text
    if "string" not in types or value is None or isinstance(value, str):
        return value
    # Of an optional text, what looks like a number is a text.
    kind = _TYPES[type(value)]
    is_wanted = kind in types or (kind == "integer" and "number" in types)
    return value if is_wanted else text


def _load(text: str) -> Any:
    """Read a value as JSON, or as Python's `True`, `None`, list or dictionary; else ValueError.

    Qwen3.5's chat template shows the model its own calls with Python's words.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        value = LiteralReader(text).literal()
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        raise ValueError("a text or a number that is no JSON")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _find_types(schema: Any, root: Any, known: dict[str, _Types]) -> _Types:
    """Return the types that a schema names, which may be one of several; none: it may be any.

    `known`: those of references that were followed, each once.
    """
    match schema:
        case {"type": str(one)}:
            return _Types({one})
        case {"type": [*several]}:
            return _Types(one for one in several if isinstance(one, str))
        case {"$ref": str(reference)}:
            if reference not in known:
                known[reference] = _ANY
                known[reference] = _find_types(find_schema(root, reference), root, known)
            return known[reference]
        case {"enum": [*values]}:
            return _Types(_TYPES[type(value)] for value in values)
        case {"const": value}:
            return _Types({_TYPES[type(value)]})
        case {"anyOf": [*members]} | {"oneOf": [*members]} | {"allOf": [*members]}:
            found = [_find_types(one, root, known) for one in members]
            return _ANY.union(*found) if all(found) else _ANY
        case _:
            return _ANY


# ---- Qwen3.5 -------------------------------------------------------------------------------------

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def read_qwen_call(body: str, functions: Functions) -> Call:
    """Read Qwen3.5's; a value is JSON, unless its function says that it is a text."""
    begun = body.strip(SPACES)
    if not begun.startswith(_FUNCTION) or not begun.endswith(_FUNCTION_END):
        raise ValueError("no call")
    inside = begun.removeprefix(_FUNCTION).removesuffix(_FUNCTION_END)
    head, bracket, rest = inside.partition(">")
    if not bracket:
        raise ValueError("a name without its end")
    name = _check_name(head.strip(SPACES))
    types = _find_argument_types(name, functions)
    spaces, *parts = rest.split(_PARAMETER)
    arguments: dict[str, Any] = {}
    for part in parts:
        key, mark, text = part.partition(">")
        value, end, behind = text.rpartition(_PARAMETER_END)
        if not mark or not end or behind.strip(SPACES):
            raise ValueError("an argument without its value")
        key = key.strip(SPACES)
        # The line breaks around a value are none of it.
        arguments[key] = _read_value(
            value.removeprefix("\n").removesuffix("\n"), types.get(key, _ANY)
        )
    if spaces.strip(SPACES):
        raise ValueError("text before the arguments")
    return name, arguments


# ---- Gemma 4 -------------------------------------------------------------------------------------

_CALL, _QUOTE = "call:", '<|"|>'


def read_gemma_call(body: str) -> Call:
    """Read Gemma 4's: keys without quotes, texts between quotes of their own."""
    begun = body.strip(SPACES)
    name, bracket, rest = begun.removeprefix(_CALL).partition("{")
    if not begun.startswith(_CALL) or not bracket:
        raise ValueError("no call")
    return _check_name(name.strip(SPACES)), GemmaReader(bracket + rest).literal()


class GemmaReader(LiteralReader):
    """Reads an object as Gemma 4 writes it."""

    def _value(self, depth: int) -> Any:
        return self._string() if self._peek() == "<" else super()._value(depth)

    def _string(self) -> str:
        if not self._text.startswith(_QUOTE, self._place):
            return super()._string()
        start = self._place + len(_QUOTE)
        end = self._text.find(_QUOTE, start)
        if end < 0:
            raise ValueError("a text without its end")
        self._place = end + len(_QUOTE)
        return self._text[start:end]

    def _key(self) -> str:
        if self._peek() in ("<", '"'):
            return self._string()
        end = self._text.find(":", self._place)
        if end < 0:
            raise ValueError("a key without its value")
        key, self._place = self._text[self._place : end].rstrip(SPACES), end
        return key
