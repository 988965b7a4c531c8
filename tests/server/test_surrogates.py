"""Halves of surrogate pairs, which JSON can hold and no text: a 400 that names the field."""

import json
from typing import Any

import pytest

from tests.server.conftest import Server

HALF = "\ud800"
USER = {"role": "user", "content": "a"}
FUNCTION = {"name": "find", "description": HALF}
BODIES: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]},
     "messages[0].content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "uuid": HALF}]}]}, "messages[0].content[0].uuid"),
    ("/v1/chat/completions", {"messages": [USER], HALF: 1}, None),
    ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"regex": HALF}},
     "structured_outputs.regex"),
    ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"choice": ["a", HALF]}},
     "structured_outputs.choice[1]"),
    ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {HALF: "a"}},
     "structured_outputs"),
    ("/v1/chat/completions", {"messages": [USER], "response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "schema": {"const": HALF}}}},
     "response_format.json_schema.schema.const"),
    ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": {
        "name": "find"}}], "tool_choice": {"type": "function", "function": {"name": HALF}}},
     "tool_choice.function.name"),
    ("/v1/chat/completions", {"messages": [USER], "tools": [
        {"type": "function", "function": FUNCTION}]}, "tools[0].function.description"),
    ("/v1/responses", {"input": [{**USER, HALF: 1}]}, "input[0]"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "text", "more": HALF}}},
     "text.format.more"),
    ("/v1/completions", {"prompt": ["a", HALF]}, "prompt[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), BODIES, ids=str)
def test_they_are_refused(
    tool_server: Server, path: str, body: dict[str, Any], param: str | None
) -> None:
    headers = {"Content-Type": "application/json"}
    response = tool_server.http.post(path, content=json.dumps(body), headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "surrogate" in error["message"]
    assert error["param"] == param
