"""Grammars of llguidance for structured outputs, and the limits that they are read under.

A grammar may still crash what reads it (thousands of rules that each name the next overflow its
stack), or take minutes: the API server reads one in a worker process first
(`frontend/prompt/grammars.py`).
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from mmjax.params.sampling_params import StructuredOutputsParams
from mmjax.system.threads import DeepStackPool

MAX_ERROR_CHARS = 300
MAX_BYTES = 2**31
"""Memory of the process that reads a grammar."""
READER_STACK_BYTES = 2**22
"""Stack of the thread that reads a grammar in the worker process."""
STACK_BYTES = 2**26
"""Stack of a thread that reads it in the engine: what passed in the worker process passes there."""

_ANY_TOKENS = '%llguidance {"no_forcing": true}'
"""Without it, where only one text can follow, llguidance allows no tokens but those that the
tokenizer would make of it: a mask that no other engine has, and that says nothing of the text."""


FORMATS = frozenset(
    "date date-time duration email hostname ipv4 ipv6 time uri uuid".split(),
)
"""What llguidance enforces; any other format is a remark, as JSON Schema has it."""
_NAMED_SCHEMAS = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
"""Keywords whose values are schemas by name: no name in there is a keyword."""
_DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are no schemas."""
_REMARKS = frozenset({"$comment", "description", "title"})
_TIME_OF_DAY = r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_DOMAIN = r"[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_EQUAL_PATTERNS = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@(" + _DOMAIN: (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:" + _DOMAIN
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_TIME_OF_DAY})?|{_TIME_OF_DAY})$"
    ),
}
"""Patterns of zod that look ahead, as its later versions write them, and what says the same:
`z.email()` and `z.iso.duration()`."""
_ZOD_TIME = r"^(?:[01]\d|2[0-3]):[0-5]\d"
"""Begins what `z.iso.time()` writes, which has no offset from UTC."""


class ReadGrammar(msgspec.Struct):
    """A grammar, or what is wrong with it."""

    grammar: str = ""
    error: str = ""


def make_limits() -> Any:
    """Return llguidance's limits (`LLParserLimits`), in the API server and in the engine alike."""
    # On use only: few requests have a grammar.
    from llguidance import LLParserLimits

    return LLParserLimits(
        # 1 to 2 kB each, of one request.
        max_lexer_states=25_000,
        # Details of the parser's state say nothing to a client.
        verbose_errors=False,
    )


def make_grammar(params: StructuredOutputsParams) -> str:
    """Return the grammar of what the answer must match; ValueError if there is none."""
    return f"{_make_lark(params)}\n{_ANY_TOKENS}"


def _make_lark(params: StructuredOutputsParams) -> str:
    from llguidance import grammar_from, regex_to_lark

    if params.regex is not None:
        return f"start: /{regex_to_lark(params.regex)}/"
    if params.grammar is not None:
        # llguidance knows Lark's syntax by a line "start:", which may be "?start:" there.
        is_lark = "::=" not in params.grammar
        return grammar_from("lark" if is_lark else "grammar", params.grammar)
    if params.choice is not None:
        return grammar_from("choice", json.dumps(params.choice))
    return f"start: %json {json.dumps(_read_schema(params))}"


def find_error(grammar: str) -> str:
    """Return what is wrong with a grammar; "" if nothing is."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=make_limits())
    return messages[0] if is_error else ""


def shorten(error: str) -> str:
    """Return an error of llguidance's in one line, of bounded length."""
    text = " ".join(error.split())
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."


def _read_schema(params: StructuredOutputsParams) -> dict[str, Any]:
    assert params.json is None or isinstance(params.json, str), "a dict becomes its text"
    schema = {"type": "object"} if params.json is None else json.loads(params.json)
    schema = _change_schemas(schema, partial(_say_otherwise, schema))
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object, or true")
    if params.disable_additional_properties:
        schema = _close_objects(schema)
    return schema | {"x-guidance": _find_options(schema, params)}


def drop_remarks(schema: Any) -> Any:
    """Return the schema without its texts for readers, which may be most of its length."""
    return _change_schemas(
        schema,
        lambda given: {
            name: value
            for name, value in given.items()
            if name not in _REMARKS or not isinstance(value, str)
        },
    )


def _say_otherwise(root: Any, given: dict[str, Any]) -> dict[str, Any] | bool:
    """Return one schema of `root` without what llguidance refuses, where that changes nothing.

    Pydantic writes formats of its own (`password`, `binary`, `path`), OpenAPI `int32` and `double`;
    zod `propertyNames` of every record, and `{"not": {}}`, which nothing is, for `undefined`. Both
    write the names of a record (`dict[Literal["a", "b"], int]`) as an enum.
    """
    if given.get("not") in ({}, True):
        return False
    said = {name: value for name, value in given.items() if not _says_nothing(name, value)}
    pattern, known = said.get("pattern"), said.get("properties", {})
    if isinstance(pattern, str):
        if said.get("format") == "time" and pattern.startswith(_ZOD_TIME):
            # Of zod before 4.3. An offset must stand in what has the format: nothing has both.
            del said["format"]
        said["pattern"], *others = _split_pattern(_EQUAL_PATTERNS.get(pattern, pattern))
        if others and isinstance(said.get("allOf", []), list):
            said["allOf"] = [*said.get("allOf", []), *({"pattern": one} for one in others)]
    names = _find_names(root, said.get("propertyNames"))
    if names is None or "patternProperties" in said or not isinstance(known, dict):
        return said
    del said["propertyNames"]
    other = said.get("additionalProperties", True)
    ordered = dict.fromkeys([*(name for name in known if name in names), *names])
    properties = {name: known.get(name, other) for name in ordered}
    return said | {"properties": properties, "additionalProperties": False}


def _split_pattern(pattern: str) -> list[str]:
    """Return patterns that a text must match all: `^(?=A)B` looks ahead, `^B` and `^(?:A)` do not.

    As `z.hostname()` and rules for passwords are written.
    """
    ahead: list[str] = []
    rest = pattern.removeprefix("^")
    while rest.startswith("(?=") and (end := _find_end(rest, 3)) is not None:
        if rest[end + 1 : end + 2] in ("*", "+", "?", "{"):
            break
        ahead.append(f"^(?:{rest[3:end]})")
        rest = rest[end + 1 :]
    # Else `^` and what stands behind it are those of the first branch alone.
    is_whole = pattern.startswith("^") and _find_end(f"{rest})", 0, marks="|)") == len(rest)
    return [f"^{rest}", *ahead] if is_whole else [pattern]


def _find_end(pattern: str, place: int, marks: str = ")") -> int | None:
    """Return where in a group the first of `marks` stands that is neither nested nor a literal."""
    depth, is_class = 0, False
    while place < len(pattern):
        mark = pattern[place]
        if mark == "\\":
            place += 1
        elif is_class:
            is_class = mark != "]"
        elif mark == "[":
            is_class = True
        elif depth == 0 and mark in marks:
            return place
        elif mark in "()":
            depth += 1 if mark == "(" else -1
        place += 1
    return None


def _find_names(root: Any, given: Any) -> Sequence[str] | None:
    """Return the only names that `propertyNames` allows; None: it says it in another way."""
    match given:
        case {"$ref": str(path)} if len(given) == 1 and root is not None:
            return _find_names(None, find_schema(root, path))
        case {"enum": [*names], **others} | {"const": str(names), **others}:
            names = [names] if isinstance(names, str) else names
            is_plain = {*others} <= _REMARKS | {"type"} and others.get("type", "string") == "string"
            return names if is_plain and all(isinstance(one, str) for one in names) else None
        case _:
            return None


def find_schema(root: Any, reference: str) -> Any:
    """Return what a `$ref` within a schema leads to; None: nothing that stands in it."""
    try:
        for name in reference.removeprefix("#/").split("/"):
            root = root[int(name) if isinstance(root, list) else name]
    except (LookupError, TypeError, ValueError):
        return None
    return root


def _change_schemas(schema: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the schema with `change` of each that is in it, inner ones first, and of itself."""
    if isinstance(schema, list):
        return [_change_schemas(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for name, part in schema.items():
        if name in _NAMED_SCHEMAS and isinstance(part, dict):
            changed[name] = {key: _change_schemas(one, change) for key, one in part.items()}
        else:
            changed[name] = part if name in _DATA else _change_schemas(part, change)
    return change(changed)


def _says_nothing(name: str, value: Any) -> bool:
    match name:
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "uniqueItems":
            return value is False
        case "propertyNames":
            return value in ({}, True, {"type": "string"})
        case _:
            return False


def _find_options(schema: dict[str, Any], params: StructuredOutputsParams) -> dict[str, Any]:
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise ValueError("`x-guidance` of a JSON schema is an object")
    options = {"whitespace_flexible": True, **options}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return options


def _close_objects(schema: Any) -> Any:
    """Return the schema with no properties but the named ones, wherever it describes an object."""
    if isinstance(schema, list):
        return [_close_objects(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _close_objects(part) for name, part in schema.items()}
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


# ---- in a worker process ------------------------------------------------------------------------


def warm_up() -> None:
    """Load what a first grammar would wait for."""
    read_grammar(msgspec.json.encode(StructuredOutputsParams(json_object=True)))


def read_grammar(params: bytes) -> bytes:
    """Return a `ReadGrammar` as JSON; `params` are the encoded `StructuredOutputsParams`."""
    # In a thread, for its stack.
    with DeepStackPool(
        1, stack_bytes=READER_STACK_BYTES, thread_name_prefix="mmjax-grammar"
    ) as reader:
        return msgspec.json.encode(reader.submit(_read, params).result())


def _read(params: bytes) -> ReadGrammar:
    try:
        given = msgspec.json.decode(params, type=StructuredOutputsParams)
        grammar = make_grammar(given)
        error = find_error(grammar)
        if given.grammar is None:
            # Around it llguidance shows a place in its grammar, which no client wrote.
            error = re.sub(r"^at \d+\(\d+\): ", "", error.partition("\n   1 | ")[0])
        return ReadGrammar(grammar=grammar, error=shorten(error))
    except (ValueError, RecursionError) as error:
        return ReadGrammar(error=shorten(str(error)))
