"""A full server says so before it does, or even reads, anything."""

import json
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import pytest

from tests.server.serve_echo import STUCK_TOKEN
from tests.server.test_wire import CHAT, MESSAGES, PROMPTLY_S, Wire


@pytest.fixture(scope="module")
def full(tiny_gemma3: Path) -> Iterator[Wire]:
    """A server of two requests, which has them, and will not be done with them."""
    wire = Wire(str(tiny_gemma3), "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    body = json.dumps({"prompt": [5, STUCK_TOKEN]}).encode()
    held = [wire.send("/v1/completions", body) for _ in range(2)]
    deadline = time.monotonic() + PROMPTLY_S * 10
    while wire.served.lines.count("stuck\n") < 2:
        assert time.monotonic() < deadline, wire.served.output
        time.sleep(0.02)
    yield wire
    for connection in held:
        connection.close()
    wire.served.end()


def test_a_request_without_room_is_refused_before_its_body_is_read(full: Wire) -> None:
    body = json.dumps({"messages": MESSAGES, "user": "x" * 300_000}).encode()
    missing = 200_000
    with full.send(CHAT, body, missing=missing) as connection:
        refused = HTTPResponse(connection)
        refused.begin()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert b"takes 2" in refused.read()
        # What comes of it nevertheless is thrown away, and the connection serves on.
        connection.sendall(body[-missing:] + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/v1/chat/completions/render"]
)
def test_all_that_works_on_prompts_is_bounded_together(full: Wire, path: str) -> None:
    status, headers, body = full.ask("POST", path, b"not even JSON")
    assert status == 429
    assert headers["retry-after"] == "1"
    assert body["error"]["code"] == "rate_limit_exceeded"
    assert full.ask("GET", "/health")[0] == 200
