"""What widespread clients send, by habit too, is answered, or refused by its name.

`client_requests.json` holds the bodies as each client wrote them, driven as its documentation says;
`client` is the client and its version. Those of Open WebUI are put together from its source.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.conftest import BODIES, TOOLS_TEMPLATE, MakeServer, Server, events_of

REQUESTS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("client_requests.json").read_text(encoding="utf-8")
)
WHOLE = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Response,
}
EVENTS: dict[str, Callable[[Any], Any]] = {
    "/v1/chat/completions": ChatCompletionChunk.model_validate,
    # Its type has no null for the reason of a finish that is to come, which OpenAI sends.
    "/v1/completions": lambda event: Completion.construct(**event),
    "/v1/responses": TypeAdapter(ResponseStreamEvent).validate_python,
}
HEADERS_OF_OPENAI_NODE = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,"
    "x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,"
    "x-stainless-runtime-version"
)
"""Those that a browser asks leave for; openai-node 6."""


@pytest.mark.parametrize(
    "request_of_client", REQUESTS, ids=lambda one: f"{one['client']}: {one['request']}"
)
def test_what_clients_send(tool_server: Server, request_of_client: dict[str, Any]) -> None:
    path, body = request_of_client["path"], request_of_client["body"]
    answer = tool_server.http.post(path, json=body)
    if "refused" in request_of_client:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == request_of_client["refused"]
        return
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        whole = WHOLE[path].model_validate(answer.json())
        assert whole.usage is not None
        return
    events = [EVENTS[path](event) for event in events_of(answer)]
    if path == "/v1/responses":
        assert events[-1].response.usage is not None
        return
    assert any(choice.finish_reason for event in events for choice in event.choices)
    wants_usage = (body.get("stream_options") or {}).get("include_usage", False)
    assert (events[-1].usage is not None) == wants_usage


def test_a_browser_may_send_the_headers_of_its_client(make_server: MakeServer) -> None:
    server = make_server(allowed_origins=("https://example.com",))
    asked = {
        "origin": "https://example.com",
        "access-control-request-method": "POST",
        "access-control-request-headers": HEADERS_OF_OPENAI_NODE,
    }
    answer = server.http.options("/v1/chat/completions", headers=asked)
    assert answer.status_code == 200, answer.text
    allowed = answer.headers["access-control-allow-headers"]
    assert {name.strip() for name in allowed.split(",")} >= set(HEADERS_OF_OPENAI_NODE.split(","))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_the_effort_of_reasoning_is_the_templates_where_it_asks(
    make_server: MakeServer, path: str
) -> None:
    asking = TOOLS_TEMPLATE + "{% if reasoning_effort %}effort: {{ reasoning_effort }}{% endif %}"
    thinking = make_server(chat_template=asking)
    if path == "/v1/responses":
        body = {"input": "a", "reasoning": {"effort": "low", "summary": "auto"}}
    else:
        body = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"}
    assert "effort: low" in thinking.http.post(path, json=body).text


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("guided_json", {"type": "object"}, '`structured_outputs: {"json": ...}`'),
        ("guided_regex", "a+", '`structured_outputs: {"regex": ...}`'),
        ("guided_choice", ["a", "b"], '`structured_outputs: {"choice": [...]}`'),
        ("guided_grammar", "start: A", '`structured_outputs: {"grammar": ...}`'),
        ("guided_whitespace_pattern", " ?", '`structured_outputs: {"whitespace_pattern": ...}`'),
        ("guided_decoding_backend", "xgrammar", "it is always llguidance"),
    ],
)
def test_older_names_of_vllm_say_what_to_give(
    server: Server, field: str, value: Any, instead: str
) -> None:
    for path, body in BODIES.items():
        answer = server.http.post(path, json={**body, field: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert instead in error["message"]


def test_a_stream_has_usage_with_every_chunk(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chat = events_of(server.chat(stream=True, stream_options=options, max_tokens=3))
    completion = events_of(
        server.http.post(
            "/v1/completions",
            json={"prompt": "a red", "stream": True, "stream_options": options, "max_tokens": 3},
        )
    )
    assert [one["usage"]["completion_tokens"] for one in chat] == [0, 1, 2, 3, 3]
    assert [one["usage"]["completion_tokens"] for one in completion] == [1, 2, 3, 3]
    for events in (chat, completion):
        assert len({one["usage"]["prompt_tokens"] for one in events}) == 1


def test_a_response_has_its_usage_in_its_last_event(server: Server) -> None:
    options = {"include_usage": True, "include_obfuscation": True}
    body = {"input": "a", "stream": True, "stream_options": options}
    events = events_of(server.http.post("/v1/responses", json=body))
    assert [bool(one.get("response", {}).get("usage")) for one in events][-2:] == [False, True]
    body["stream_options"] = {"continuous_usage_stats": True}
    error = server.http.post("/v1/responses", json=body).json()["error"]
    assert error["param"] == "stream_options.continuous_usage_stats"
