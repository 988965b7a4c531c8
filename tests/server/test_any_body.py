"""Bodies made from the API's own schema, right and wrong: no 5xx, and the server goes on."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmjax.frontend.prompt.input_processor import InputProcessor
from tests.server.conftest import TOOLS, Server, servers
from tests.server.test_app import data_url
from tests.server.test_openai_client import ANSWERED, WEATHER

PICTURE = {"type": "image_url", "image_url": {"url": data_url()}}
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [PICTURE, {"type": "text", "text": "a"}]}],
        "max_tokens": 2,
    },
    "/v1/chat/completions/render": {"messages": ANSWERED, "tools": [WEATHER]},
    "/v1/completions": {"prompt": ["a red circle"], "max_tokens": 2, "echo": True},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": data_url()}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "b"},
        ],
        "max_output_tokens": 2,
    },
    "/v1/responses/input_tokens": {"input": "a"},
    "/tokenize": {"messages": ANSWERED},
    "/detokenize": {"tokens": [5, 6]},
}

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
LIKELY = st.sampled_from(
    [
        *(
            "auto",
            "none",
            "required",
            "user",
            "tool",
            "assistant",
            "function",
            "text",
            "input_image",
        ),
        *(
            "<eos>",
            "<start_of_image>",
            "resp_x",
            "{}",
            "{",
            "data:image/png;base64,",
            "\0",
            "\ud800",
        ),
        *(-1, 0, 1, 2, 64, 65, 2**31, 2**63, 0.0, 1.0, 1e308, True, False, None, [], {}),
    ]
)


@pytest.fixture(scope="module")
def open_server(
    server_input_processor: InputProcessor, roomy_input_processor: InputProcessor
) -> Iterator[Server]:
    """A server that takes as much from its clients as it can."""
    with servers(server_input_processor, roomy_input_processor) as make:
        yield make(**TOOLS, max_num_stored_responses=8)


def fields_of(schema: Mapping[str, Any], path: str) -> list[str]:
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    # A stream is tried by itself; a sleep for a timeout would be waited for.
    return sorted({*schema["components"]["schemas"][name]["properties"]} - {"stream", "timeout"})


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items: Any = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else items:
        yield from places_in(inner, (*place, key))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = changed(copy[place[0]], place[1:], new)  # type: ignore[index]
    return copy


@st.composite
def bodies(draw: st.DrawFn, schema: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a valid body with a few values put in the place of others, or beside them."""
    path = draw(st.sampled_from(sorted(VALID)))
    body: Any = VALID[path]
    for _ in range(draw(st.integers(0, 3))):
        new = draw(LIKELY | ANYTHING)
        if draw(st.booleans()):
            body = {**body, draw(st.sampled_from(fields_of(schema, path))): new}
        else:
            places = [place for place in places_in(body) if place]
            body = changed(body, draw(st.sampled_from(places)), new) if places else body
    return path, body


def check(server: Server, path: str, body: Any) -> None:
    content = json.dumps(body)
    response = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code < 500, (path, body, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"]
        assert "0x" not in error["message"]
        assert "/site-packages" not in error["message"]


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_body_is_the_servers_fault(open_server: Server, data: st.DataObject) -> None:
    schema = open_server.app.openapi()
    path, body = data.draw(bodies(schema))
    check(open_server, path, body)
    assert open_server.engine_client.num_requests == 0


@pytest.mark.slow
@settings(
    max_examples=20_000,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_body_of_very_many_is_the_servers_fault(
    open_server: Server, data: st.DataObject
) -> None:
    path, body = data.draw(bodies(open_server.app.openapi()))
    check(open_server, path, body)
    assert open_server.engine_client.num_requests == 0
