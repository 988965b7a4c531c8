"""Schemas of functions with references in them, for calls that are asked for."""

import json
from functools import partial
from typing import Any

import llguidance
import pytest

from mmjax.config.engine_config import ServerConfig
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.chat_tools import MAX_TOOLS
from mmjax.params.sampling_params import MAX_GRAMMAR_CHARS, SamplingParams
from mmjax.server.openai.tool_use import ToolUse, plan_tool_use
from tests.server.conftest import TOOLS_TEMPLATE, MakeServer

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NESTED = {
    "$defs": {"Place": PLACE},
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
}
"""As pydantic writes it for a model within a model."""
TREE = {
    "$defs": {"Place": {"type": "integer"}},
    "type": "object",
    "properties": {"child": {"$ref": "#"}, "age": {"$ref": "#/$defs/Place"}},
}
"""Has itself in it, and another definition of the same name."""


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "find"}}], ids=str
)
def test_references_lead_to_the_functions_own_definitions(
    make_server: MakeServer, choice: Any
) -> None:
    server = make_server(is_roomy=True, chat_template=TOOLS_TEMPLATE)
    response = server.chat(tools=[tool("find", NESTED), tool("grow", TREE)], tool_choice=choice)
    assert response.status_code == 200, response.text


def matches(functions: Any, choice: str, answer: Any) -> bool:
    """Return whether an answer may come where a call is asked for."""
    tools = ToolUse(functions=functions, choice=choice, is_parallel=True, format=None)
    structure = tools.sampling_params(SamplingParams()).structured_outputs
    assert structure is not None
    assert structure.json is not None
    grammar = llguidance.LLMatcher.grammar_from_json_schema(structure.json)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    text = json.dumps(answer, separators=(",", ":")).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def test_what_they_say_holds() -> None:
    is_allowed = partial(
        matches, {"find": {"parameters": NESTED}, "grow": {"parameters": TREE}}, "required"
    )
    assert is_allowed([{"name": "find", "parameters": {"place": {"city": "Oslo"}}}])
    assert not is_allowed([{"name": "find", "parameters": {"place": 3}}])
    assert is_allowed([{"name": "grow", "parameters": {"child": {"age": 3}}}])
    assert not is_allowed([{"name": "grow", "parameters": {"child": {"age": {"city": "Oslo"}}}}])


def test_a_call_that_is_asked_for_is_of_a_tool_that_is_allowed() -> None:
    named = [{"type": "function", "function": {"name": "grow"}}]
    tools = plan_tool_use(
        [tool("find", NESTED), tool("grow", TREE)],
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}},
        is_parallel=True,
        config=ServerConfig(),
        template=ChatTemplate(TOOLS_TEMPLATE, None),
    )
    assert tools is not None
    assert matches(tools.functions, tools.choice, [{"name": "grow", "parameters": {"age": 3}}])
    other = [{"name": "find", "parameters": {"place": {"city": "Oslo"}}}]
    assert not matches(tools.functions, tools.choice, other)


@pytest.mark.parametrize(
    "parameters",
    [{}, {"properties": {"a": {"type": "string"}}}, {"$defs": {"P": PLACE}, "$ref": "#/$defs/P"}],
    ids=str,
)
def test_arguments_are_an_object_also_where_no_type_says_so(parameters: Any) -> None:
    functions = {"f": {"parameters": parameters}}
    arguments = {"city": "Oslo"}
    assert matches(functions, "f", arguments)
    assert matches(functions, "required", [{"name": "f", "parameters": arguments}])
    for other in (7, "a", ["a"], None):
        assert not matches(functions, "f", other)
        assert not matches(functions, "required", [{"name": "f", "parameters": other}])


def test_descriptions_of_many_functions_are_no_part_of_what_must_match() -> None:
    number = {"type": "integer", "title": "N", "description": "how many " * 60}
    parameters = {"properties": {"description": number}, "required": ["description"]}
    functions = {f"f{index}": {"parameters": parameters} for index in range(MAX_TOOLS)}
    assert len(json.dumps(functions)) > MAX_GRAMMAR_CHARS
    calls = [{"name": "f7", "parameters": {"description": 3}}]
    assert matches(functions, "required", calls)
    assert not matches(functions, "required", [{"name": "f7", "parameters": {}}])


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "Unimplemented keys"),
        ({"enum": ["a" * MAX_GRAMMAR_CHARS]}, "characters"),
    ],
)
def test_a_schema_that_is_refused_is_one_of_tools(
    make_server: MakeServer, schema: Any, reason: str
) -> None:
    server = make_server(is_roomy=True, chat_template=TOOLS_TEMPLATE)
    tools = [tool("f", {"type": "object", "properties": {"a": schema}})]
    response = server.chat(tools=tools, tool_choice="required")
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], "`tools`" in error["message"]) == ("tools", True), error
    assert reason in error["message"]
