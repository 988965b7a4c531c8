"""/v1/messages: Anthropic's API, whole and streamed."""

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from mmjax.frontend.prompt.input_processor import InputProcessor
from tests.server.conftest import TOOLS, TOOLS_TEMPLATE, MakeServer, Server, servers
from tests.server.test_app import PROMPT, data_url
from tests.server.test_openai_client import CALL, CALLS, TEXT_AMONG_CALLS

_, _, PIXELS = data_url().partition(";base64,")
PICTURE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PIXELS},
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TIME = {"name": "get_time", "input_schema": {"type": "object"}}
THINKING_TEMPLATE = TOOLS_TEMPLATE.replace(
    "{% if message.content is string %}",
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif -%}"
    "{% if message.content is string %}",
).replace(
    "{% if style",
    "{% if enable_thinking is defined %}thinks: {{ enable_thinking }}{% endif -%}\n{% if style",
)


@pytest.fixture(scope="module")
def module_servers(
    server_input_processor: InputProcessor, roomy_input_processor: InputProcessor
) -> Iterator[dict[str, Server]]:
    # Processors of their own, one for each: they are at work in one server's event loop.
    plain, tools, thinking = (
        InputProcessor(one.model_config)
        for one in (server_input_processor, roomy_input_processor, roomy_input_processor)
    )
    with servers(plain, tools) as make, servers(plain, thinking) as make_thinking:
        yield {
            "plain": make(),
            "tools": make(**TOOLS),
            "thinking": make_thinking(
                is_roomy=True, chat_template=THINKING_TEMPLATE, reasoning_parser="qwen3"
            ),
        }


def body(fields: dict[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 256, **fields}
    if isinstance(asked.get("messages"), str):
        asked["messages"] = [{"role": "user", "content": asked["messages"]}]
    return asked


def stream(server: Server, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which its own line names."""
    response = server.http.post("/v1/messages", json=body(fields) | {"stream": True})
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def join(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of a stream, as Anthropic's does."""
    assert events[0]["type"] == "message_start"
    assert events[-1] == {"type": "message_stop"}
    message, arguments = dict(events[0]["message"]), ""
    message["content"] = []
    is_open = False
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                is_open, arguments = True, ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        arguments += delta["partial_json"]
                        block["input"] = {}
            case "content_block_stop":
                assert is_open
                is_open = False
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(arguments or "{}")
            case "message_delta":
                assert not is_open
                message |= {**event["delta"], "usage": event["usage"]}
    return message


@dataclass
class Case:
    name: str
    fields: dict[str, Any]
    check: Callable[[Any], Any]
    says: str | None = None
    server: str = "plain"


def text_of(message: dict[str, Any]) -> str:
    return "".join(one["text"] for one in message["content"] if one["type"] == "text")


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


ASKED = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Oslo"}},
        ],
    },
    user({"type": "tool_result", "tool_use_id": "c1", "content": "rain"}),
]
CASES = [
    Case("text", {"messages": "a red circle"}, lambda m: text_of(m) == PROMPT),
    Case(
        "its form",
        {"messages": "a"},
        lambda m: (
            m["id"].startswith("msg_")
            and (m["type"], m["role"], m["model"]) == ("message", "assistant", "tiny")
            and (m["stop_reason"], m["stop_sequence"]) == ("end_turn", None)
        ),
    ),
    Case(
        "usage",
        {"messages": "what the usage is"},
        lambda m: (
            m["usage"]["output_tokens"]
            == m["usage"]["input_tokens"] + m["usage"]["cache_read_input_tokens"] + 1
        ),
    ),
    Case(
        "a system message",
        {"messages": "a", "system": [{"type": "text", "text": "be short", "cache_control": {}}]},
        lambda m: text_of(m).startswith("user\nbe short"),
    ),
    Case(
        "a picture",
        {"messages": [user({"type": "text", "text": "What?"}, PICTURE)]},
        lambda m: "What?" in text_of(m) and sum(m["usage"].values()) > 12,
    ),
    Case(
        "a document of text",
        {
            "messages": [
                user({"type": "document", "source": {"type": "text", "data": "a red circle"}})
            ]
        },
        lambda m: "a red circle" in text_of(m),
    ),
    Case(
        "nothing",
        {"messages": [{"role": "user", "content": []}]},
        lambda m: text_of(m) == "user\n\nmodel\n",
    ),
    Case("a limit", {"messages": "a", "max_tokens": 2}, lambda m: m["stop_reason"] == "max_tokens"),
    Case(
        "a stop",
        {"messages": "a red circle", "stop_sequences": ["circle"]},
        lambda m: (
            (m["stop_reason"], m["stop_sequence"]) == ("stop_sequence", "circle")
            and text_of(m) == PROMPT.partition("circle")[0]
        ),
    ),
    Case(
        "what goes on",
        {
            "messages": [
                {"role": "user", "content": "a red circle"},
                {"role": "assistant", "content": "It is"},
            ]
        },
        lambda m: text_of(m).endswith("model\nIt is"),
    ),
    Case(
        "a call",
        {"messages": "weather?", "tools": [WEATHER]},
        lambda m: (
            [(one["type"], one["name"], one["input"]) for one in m["content"]]
            == [("tool_use", "get_weather", {"city": "Oslo"})]
            and m["stop_reason"] == "tool_use"
            and m["content"][0]["id"]
        ),
        says=CALL,
        server="tools",
    ),
    Case(
        "calls behind a text",
        {"messages": "weather?", "tools": [WEATHER, TIME]},
        lambda m: [one["type"] for one in m["content"]] == ["text", "tool_use", "tool_use"],
        says=CALLS,
        server="tools",
    ),
    Case(
        # The stop string holds back what ends a call, which then comes with the text behind it.
        "text among calls",
        {"messages": "a", "tools": [WEATHER, TIME], "stop_sequences": ["}}\n</tool_call>. A "]},
        lambda m: (
            [one.get("text", one.get("input")) for one in m["content"]]
            == [{"city": "Oslo"}, ". And:", {}, "."]
        ),
        says=TEXT_AMONG_CALLS,
        server="tools",
    ),
    Case(
        "one call",
        {
            "messages": "weather?",
            "tools": [WEATHER, TIME],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
        lambda m: [one["type"] for one in m["content"]] == ["text", "tool_use"],
        says=CALLS,
        server="tools",
    ),
    Case(
        "a tool by its name",
        {
            "messages": "weather?",
            "tools": [WEATHER, TIME],
            "tool_choice": {"type": "tool", "name": "get_weather"},
        },
        lambda m: m["content"][0]["input"] == {"city": "Oslo"} and m["stop_reason"] == "tool_use",
        says='{"city": "Oslo"}',
        server="tools",
    ),
    Case(
        "no tool",
        {"messages": "weather?", "tools": [WEATHER], "tool_choice": {"type": "none"}},
        lambda m: text_of(m) == CALL,
        says=CALL,
        server="tools",
    ),
    Case(
        "a result",
        {"messages": ASKED, "tools": [WEATHER], "max_tokens": 1024},
        lambda m: (
            "Let me look." in text_of(m)
            # The echo of the call that the assistant has made.
            and {"city": "Oslo"} in [one.get("input") for one in m["content"]]
            and "tool\nrain" in text_of(m)
            and "hm" not in text_of(m)
        ),
        server="tools",
    ),
    Case(
        "thoughts",
        {"messages": "why?"},
        lambda m: (
            [(one["type"], one.get("thinking", one.get("text"))) for one in m["content"]]
            == [("thinking", "Hm. "), ("text", "So.")]
            and m["content"][0]["signature"] == ""
        ),
        says="<think>Hm. </think>So.",
        server="thinking",
    ),
    Case(
        "thoughts that are sent back, and wanted again",
        {"messages": ASKED, "thinking": {"type": "enabled", "budget_tokens": 1024}},
        lambda m: "(hm)" in text_of(m) and "thinks: True" in text_of(m),
        server="thinking",
    ),
    Case(
        "no thoughts",
        {"messages": "why?", "thinking": {"type": "disabled"}},
        lambda m: [one["type"] for one in m["content"]] == ["text"],
        says="<think>Hm. </think>So.",
        server="thinking",
    ),
    Case(
        "fields without effect",
        {"messages": "a", "metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": None},
        lambda m: m["stop_reason"] == "end_turn",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_message(module_servers: dict[str, Server], case: Case) -> None:
    server = module_servers[case.server]
    server.will_say(case.says)
    response = server.http.post("/v1/messages", json=body(case.fields))
    assert response.status_code == 200, response.text
    whole = response.json()
    assert case.check(whole), whole
    streamed = join(stream(server, case.fields))
    assert case.check(streamed), streamed
    server.will_say(None)


@pytest.mark.parametrize(
    ("says", "arguments"),
    [('{"city": "\\ud800"}', {"city": "\ufffd"}), ('{"city": ' + "[" * 2048, {})],
    ids=["half of a surrogate pair", "lists within lists"],
)
def test_arguments_that_json_cannot_hold(
    module_servers: dict[str, Server], says: str, arguments: dict[str, Any]
) -> None:
    server = module_servers["tools"]
    server.will_say(says)
    asked = {"type": "tool", "name": "get_weather"}
    fields = {"messages": "a", "tools": [WEATHER], "tool_choice": asked, "max_tokens": 1024}
    response = server.http.post("/v1/messages", json=body(fields))
    assert response.status_code == 200, response.text
    assert response.json()["content"][0]["input"] == arguments
    assert stream(server, fields)[-1] == {"type": "message_stop"}
    server.will_say(None)


BROKEN_PICTURE = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(b"none").decode(),
    },
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no limit", {"max_tokens": None}, "max_tokens"),
    ("a role", {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ("no messages", {"messages": []}, "messages"),
    (
        "a PDF",
        {"messages": [user({"type": "document", "source": {"type": "base64", "data": "x"}})]},
        "messages[0].content[0].source",
    ),
    ("a block", {"messages": [user({"type": "video"})]}, "messages[0].content[0].type"),
    (
        "a result of no call",
        {"messages": [user({"type": "text", "text": "a"}, {"type": "tool_result"})]},
        "messages[0].content[1].tool_use_id",
    ),
    (
        "a broken picture",
        {"messages": [user("a"), user(BROKEN_PICTURE)]},
        "messages[1].content[0].image_url",
    ),
    (
        "a broken picture behind a thought",
        {
            "messages": [
                user("a"),
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "hm"}, BROKEN_PICTURE],
                },
                user("b"),
            ]
        },
        "messages[1].content[1].image_url",
    ),
    ("a server's tool", {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
    ("a tool without a name", {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ("a tool's name", {"tools": [WEATHER, {**WEATHER, "name": "a b"}]}, "tools[1].name"),
    ("a tool's schema", {"tools": [{**WEATHER, "input_schema": 3}]}, "tools[0].input_schema"),
    (
        "a schema",
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "colour"}}}},
        "output_config.format.schema",
    ),
    ("an unknown field", {"mcp_servers": [{}]}, "mcp_servers"),
    ("a heat", {"temperature": "hot"}, "temperature"),
    ("a stop", {"stop_sequences": [""]}, "stop_sequences"),
    ("more tokens than the model reads", {"messages": "red " * 400}, "messages"),
]


@pytest.mark.parametrize(("name", "fields", "param"), REFUSED, ids=[one[0] for one in REFUSED])
def test_what_is_refused_is_named(
    module_servers: dict[str, Server], name: str, fields: dict[str, Any], param: str
) -> None:
    response = module_servers["plain"].http.post(
        "/v1/messages", json=body({"messages": "a", **fields})
    )
    assert response.status_code == (422 if "broken" in name else 400), response.text
    answer = response.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert answer["error"]["param"].startswith(param), answer
    assert answer["error"]["message"]
    assert answer["request_id"]


def test_tokens_are_counted_as_they_are_used(module_servers: dict[str, Server]) -> None:
    asked = {"system": "be short", "messages": [user({"type": "text", "text": "What?"}, PICTURE)]}
    server = module_servers["plain"]
    counted = server.http.post("/v1/messages/count_tokens", json={"model": "tiny", **asked})
    usage = server.http.post("/v1/messages", json=body(asked)).json()["usage"]
    cached = usage["cache_read_input_tokens"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + cached}


def test_the_key_of_anthropics_clients(make_server: MakeServer) -> None:
    server = make_server(api_keys=("first",))

    def ask(headers: dict[str, str]) -> int:
        asked = body({"messages": "a"})
        return server.http.post("/v1/messages", json=asked, headers=headers).status_code

    assert ask({"x-api-key": "first"}) == 200
    assert ask({"x-api-key": "second"}) == 401
    assert ask({"x-api-key": "first", "authorization": "Bearer first"}) == 401
    wrong = server.http.post("/v1/messages", json={}).json()
    assert (wrong["type"], wrong["error"]["type"]) == ("error", "authentication_error")


def test_an_error_within_a_stream_is_an_event(make_server: MakeServer) -> None:
    server = make_server()
    server.end_behind_a_step()
    *begun, last = stream(server, {"messages": "a red circle"})
    assert begun[0]["type"] == "message_start"
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
