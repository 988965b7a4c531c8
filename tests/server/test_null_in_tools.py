"""Null in a tool or in a call is what is absent, as in all other objects of a body."""

from typing import Any

import pytest

from tests.server.conftest import TOOLS, MakeServer, Server


def test_null_is_absent(make_server: MakeServer) -> None:
    server = make_server(**TOOLS)
    nothing: dict[str, Any] = {"cache_control": None}
    function = {"name": "find", "description": None, "parameters": None, "strict": None, **nothing}
    tool = {"type": "function", "function": function, **nothing}
    made = {"name": "find", "arguments": "{}", **nothing}
    call: dict[str, Any] = {"id": "1", "type": None, "function": made, "custom": None}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
    response = server.chat(messages=messages, tools=[tool])
    assert response.status_code == 200, response.text
    call["custom"] = {}
    response = server.chat(messages=messages, tools=[tool])
    assert response.json()["error"]["param"] == "messages[1].tool_calls[0].custom"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "x": None}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_null_is_absent_of_fields_of_other_servers(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    others = dict.fromkeys(("kv_transfer_params", "vllm_xargs", "guided_json"))
    response = server.http.post(path, json={**body, **others})
    assert response.status_code == 200, response.text
    response = server.http.post(path, json={**body, **others, "vllm_xargs": {}})
    assert response.json()["error"]["param"] == "vllm_xargs"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("structured_outputs", {"regex": "a", "structural_tag": None}),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "more": None}},
        ),
    ],
)
def test_null_is_absent_of_what_an_answer_must_match(
    server: Server, name: str, given: dict[str, Any]
) -> None:
    response = server.chat(**{name: given})
    assert response.status_code == 200, response.text
