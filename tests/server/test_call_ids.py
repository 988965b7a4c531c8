"""Ids of calls, where a chat template shows a call by its id: Kimi's and Mistral's."""

from typing import Any

import pytest

from tests.frontend.test_tool_calls import SECTION, kimi
from tests.server.conftest import TOOLS, TOOLS_TEMPLATE, MakeServer, Server, events_of

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASKED = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
EARLIER: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [ASKED]},
    {"role": "tool", "tool_call_id": "functions.f:0", "content": "b"},
]


def serve(make_server: MakeServer, mark: str, says: str) -> Server:
    """Return a server whose model writes calls behind a mark."""
    template = TOOLS_TEMPLATE.replace("<tool_call>", mark).replace("</tool_call>", "")
    server = make_server(**TOOLS | {"chat_template": template})
    server.will_say(says)
    return server


def calls_of(server: Server, *, stream: bool, **fields: Any) -> list[tuple[str, str, str]]:
    """Return id, name and arguments of each call."""
    body = {"messages": EARLIER, "tools": [TOOL], "stream": stream, **fields}
    answer = server.chat(**body)
    assert answer.status_code == 200, answer.text
    if not stream:
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
        return [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in calls]
    found: dict[int, list[str]] = {}
    for choice in (one for event in events_of(answer) for one in event["choices"]):
        for call in choice["delta"].get("tool_calls") or ():
            one = found.setdefault(call["index"], ["", "", ""])
            one[0] += call.get("id") or ""
            one[1] += call["function"].get("name") or ""
            one[2] += call["function"].get("arguments") or ""
    return [(one[0], one[1], one[2]) for one in found.values()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_kimi_s_keeps_the_id_that_the_model_gave_it(
    make_server: MakeServer, stream: bool
) -> None:
    said = kimi("functions.f:1", '{"a": 1}', "functions.f:2", "{}")
    server = serve(make_server, SECTION, f"so {said}")
    assert calls_of(server, stream=stream) == [
        ("functions.f:1", "f", '{"a": 1}'),
        ("functions.f:2", "f", "{}"),
    ]
    server.will_say(kimi("f", "{}"))
    assert calls_of(server, stream=stream) == [("functions.f:1", "f", "{}")]


def test_a_call_that_is_asked_for_has_such_an_id_too(make_server: MakeServer) -> None:
    said = '[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {}}]'
    server = serve(make_server, SECTION, said)
    found = calls_of(server, stream=False, tool_choice="required")
    assert [one[0] for one in found] == ["functions.f:1", "functions.f:2"]
    server = serve(make_server, "[TOOL_CALLS]", said)
    found = calls_of(server, stream=False, tool_choice="required")
    assert [len(one[0]) for one in found] == [9, 9]
