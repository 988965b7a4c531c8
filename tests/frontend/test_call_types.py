"""The types of arguments that models write without quotes, by their functions' schemas."""

import json
from typing import Any

import pytest

from mmjax.frontend.output.tool_calls.parsers import TOOL_CALL_FORMATS
from tests.frontend.test_tool_calls import read

OPTIONAL: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
"""As pydantic writes `str | None`."""


@pytest.mark.parametrize(
    ("schema", "said", "expected"),
    [
        (OPTIONAL, "90210", "90210"),
        (OPTIONAL, "null", None),
        (OPTIONAL, "true", "true"),
        (OPTIONAL, "Oslo", "Oslo"),
        ({"type": ["string", "null"]}, "1.5", "1.5"),
        ({"oneOf": [{"type": "string"}, {"type": "number"}]}, "7", 7),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/P"}]}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": "string"}, "7", 7),
        ({}, "7", 7),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "False", False),
        ({"type": ["integer", "null"]}, "None", None),
        (OPTIONAL, "None", None),
        (OPTIONAL, "False", "False"),
        (OPTIONAL, "'so'", "'so'"),
        ({"type": "string"}, "True", "True"),
        ({"type": "array"}, "['a', {'b': True}]", ["a", {"b": True}]),
        ({"type": "array"}, "['a'", "['a'"),
        ({"type": "number"}, "NaN", "NaN"),
        ({}, "[1] and [2]", "[1] and [2]"),
        ({"$ref": "#/$defs/Year"}, "2023", "2023"),
        ({"allOf": [{"$ref": "#/$defs/Year"}], "default": "2023"}, "2023", "2023"),
        ({"anyOf": [{"$ref": "#/$defs/Year"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/Year"}, {"type": "null"}]}, "2023", "2023"),
        ({"$ref": "#/$defs/Tree"}, "7", 7),
        ({"$ref": "#/$defs/None"}, "7", 7),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "all"]}, "1", 1),
        ({"const": "1"}, "1", "1"),
    ],
)
def test_a_text_stays_one_where_it_is_one_of_several_types(
    schema: Any, said: str, expected: Any
) -> None:
    defined = {
        # As pydantic writes an Enum of texts.
        "Year": {"enum": ["2023", "2024"], "title": "Year", "type": "string"},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "string"}]},
    }
    functions = {"f": {"parameters": {"properties": {"a": schema}, "$defs": defined}}}
    for name, text in (
        ("glm45", f"<tool_call>f<arg_key>a</arg_key><arg_value>{said}</arg_value></tool_call>"),
        (
            "qwen3_coder",
            f"<tool_call><function=f><parameter=a>{said}</parameter></function></tool_call>",
        ),
    ):
        ((_, arguments),) = read(TOOL_CALL_FORMATS[name].make(functions), text)[1]
        assert json.loads(arguments) == {"a": expected}


def test_a_schema_that_is_none_says_nothing() -> None:
    functions: dict[str, Any] = {"f": {"parameters": {"properties": "none"}}}
    said = "<tool_call>f<arg_key>a</arg_key><arg_value>7</arg_value></tool_call>"
    assert read(TOOL_CALL_FORMATS["glm45"].make(functions), said) == ("", [("f", '{"a": 7}')])
