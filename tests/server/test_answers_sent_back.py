"""Answers that the official client has parsed, or the server, sent back as they came."""

import warnings
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import TOOLS, MakeServer, Server
from tests.server.test_openai_client import CALL


class Weather(BaseModel):
    city: str


TOOL: Any = openai.pydantic_function_tool(Weather, name="get_weather")


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    return make_server(**TOOLS)


def test_a_call_that_is_asked_for_comes_in_place_of_the_structure(server: Server) -> None:
    """As with OpenAI: agents send the form of their last answer with every question."""
    form = {"name": "answer", "schema": {"type": "array"}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields: dict[str, Any] = {
        "tools": [TOOL],
        "response_format": {"type": "json_schema", "json_schema": form},
    }
    for choice in ("required", named):
        assert server.chat(**fields, tool_choice=choice).status_code == 200
    assert server.chat(**fields).status_code == 200
    structures: list[Any] = [
        one.sampling_params.structured_outputs for one in server.supervisor.engine.added
    ]
    *asked, free = (one.json for one in structures)
    assert all("city" in one for one in asked)
    assert "city" not in free


@pytest.mark.parametrize("stream", [False, True])
def test_a_parsed_call(server: Server, stream: bool) -> None:
    server.will_say(CALL)
    client: Any = server.openai().chat.completions
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}
    if stream:
        with client.stream(**asked) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.parse(**asked).choices[0].message
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Oslo")
    server.will_say(None)
    asked["messages"] += [message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    answer = client.create(tool_choice="none", **asked)
    assert '<tool_call>{"name": "get_weather"' in answer.choices[0].message.content


def test_a_parsed_text(server: Server) -> None:
    server.will_say('{"city": "Oslo"}')
    client: Any = server.openai().chat.completions
    messages: list[Any] = [{"role": "user", "content": "a"}]
    asked = {"model": "tiny", "messages": messages}
    message = client.parse(response_format=Weather, **asked).choices[0].message
    assert message.parsed == Weather(city="Oslo")
    server.will_say(None)
    with warnings.catch_warnings():
        # The client's own, about its type of this field.
        warnings.simplefilter("ignore")
        messages += [message, {"role": "user", "content": "b"}]
        answer = client.create(**asked)
    assert '{"city": "Oslo"}' in answer.choices[0].message.content


def test_boxes_of_the_server(server: Server) -> None:
    boxes = {"<OD>": {"bboxes": [[1, 2, 3, 4]], "labels": ["circle"]}}
    said = {"role": "assistant", "content": "circle", "parsed": boxes}
    user = {"role": "user", "content": "b"}
    assert server.chat(messages=[user, said, user]).status_code == 200
    item: dict[str, Any] = {"type": "message", "id": "msg_1", "status": "completed", **said}
    item["content"] = [{"type": "output_text", "text": "circle", "annotations": []}]
    response = server.http.post("/v1/responses", json={"input": [user, item, user]})
    assert response.status_code == 200, response.text
