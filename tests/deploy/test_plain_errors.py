"""Plain text of Ray's, and OpenAI's errors in its place."""

import json
from collections.abc import Sequence
from typing import Any, cast

import openai
import pytest
from starlette.middleware import Middleware
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from mmjax.config.engine_config import ServerConfig
from mmjax.deploy.plain_errors import ray_middlewares, replace_plain_errors
from mmjax.deploy.replica import ResponseEnd, ResponseHead, ResponsePart
from mmjax.deploy.router import create_router
from tests.deploy.test_exchange import EAGER, Scripted, Step

TEXT = (b"content-type", b"text/plain; charset=utf-8")


def proxy(*messages: Message) -> TestClient:
    """Ray's proxy, which answers so."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return TestClient(replace_plain_errors(app), raise_server_exceptions=False)


def text(status: int, *headers: tuple[bytes, bytes]) -> Sequence[Message]:
    return (
        {"type": "http.response.start", "status": status, "headers": [TEXT, *headers]},
        {"type": "http.response.body", "body": b"Deployment ", "more_body": True},
        {"type": "http.response.body", "body": b"is gone"},
    )


@pytest.mark.parametrize(
    ("messages", "status", "code", "retry_after"),
    [
        # Its front has died: nothing is sent, and uvicorn would answer "Internal Server Error".
        ((), 503, "engine_unavailable", "1"),
        (text(503), 503, "engine_unavailable", "1"),
        (text(503, (b"retry-after", b"7")), 503, "engine_unavailable", "7"),
        (text(503, (b"retry-after", b"soon")), 503, "engine_unavailable", "1"),
        (text(429, (b"retry-after", b"3")), 429, "rate_limit_exceeded", "3"),
        (text(408), 408, "request_timeout", None),
        (text(500), 500, "internal_error", None),
        (text(404), 404, "http_404", None),
    ],
)
def test_plain_text_becomes_openais_error(
    messages: Sequence[Message], status: int, code: str, retry_after: str | None
) -> None:
    response = proxy(*messages).post("/v1/chat/completions")
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    assert response.headers.get("retry-after") == retry_after
    error = response.json()["error"]
    assert error["code"] == code
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "is gone" not in response.text
    assert int(response.headers["content-length"]) == len(response.content)


def test_ray_gets_what_it_asks_for() -> None:
    """A list of Starlette's middlewares, or it refuses to start."""
    found = ray_middlewares()
    assert all(isinstance(one, Middleware) for one in found)
    assert [one.cls for one in found] == [replace_plain_errors]


def test_the_requests_id_stays() -> None:
    assert proxy(*text(500, (b"x-request-id", b"7"))).get("/").headers["x-request-id"] == "7"


@pytest.mark.parametrize(("status", "kind"), [(200, b"text/plain"), (400, b"application/json")])
def test_other_responses_pass_as_they_are(status: int, kind: bytes) -> None:
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", kind)],
    }
    response = proxy(start, {"type": "http.response.body", "body": b"{}"}).get("/")
    assert (response.status_code, response.content) == (status, b"{}")


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_front_answers_a_replicas_plain_text_as_its_own(status: int) -> None:
    script: list[Step] = [
        ResponseHead("a", status, [TEXT]),
        ResponsePart(b"Internal Server Error", None),
        ResponseEnd(True),
    ]
    front = create_router(Scripted([script]), ServerConfig(), max_requests=9, patience=EAGER)
    with TestClient(front) as http:
        response = http.post("/v1/chat/completions", json={})
        assert response.status_code == (500 if status == 500 else 503)
        error = response.json()["error"]
        assert error["code"] == ("internal_error" if status == 500 else "engine_unavailable")
        assert (status == 500) == ("retry-after" not in response.headers)
        request_id = response.headers["x-request-id"]
        assert (request_id in error["message"]) == (status == 500)


def test_openais_client_asks_again_where_its_front_has_died() -> None:
    """By itself, at once, and gets its answer from the next one."""
    died: list[bool] = []
    answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": []}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not died:
            died.append(True)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    http = cast(Any, TestClient(replace_plain_errors(app), base_url="http://front"))
    with openai.OpenAI(base_url="http://front/v1", api_key="k", http_client=http) as client:
        found = client.chat.completions.create(model="m", messages=[])
    assert found.id == "x"
    assert died
