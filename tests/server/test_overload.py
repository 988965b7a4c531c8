"""A full server says so before it does, or even reads, anything."""

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from mmjax.config.engine_config import SchedulerConfig
from tests.server.conftest import MakeServer
from tests.server.serve_echo import STUCK_TOKEN
from tests.server.test_wire import CHAT, MESSAGES, PROMPTLY_S, Wire


@pytest.fixture(scope="module")
def full(tiny_gemma3: Path) -> Iterator[Wire]:
    """A server of two requests, which has them, and will not be done with them."""
    wire = Wire(str(tiny_gemma3), "--max-num-seqs", "1", "--max-num-queued-reqs", "1")
    with ExitStack() as stack:
        stack.callback(wire.served.end)
        body = json.dumps({"prompt": [5, STUCK_TOKEN]}).encode()
        for _ in range(2):
            stack.enter_context(wire.send("/v1/completions", body))
        deadline = time.monotonic() + PROMPTLY_S * 10
        # Two threads may write it into one line.
        while "".join(wire.served.lines).count("stuck") < 2:
            assert time.monotonic() < deadline, wire.served.output
            time.sleep(0.02)
        yield wire


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


def test_load_is_the_number_of_requests(full: Wire) -> None:
    assert full.ask("GET", "/load")[2] == {"server_load": 2}


def test_one_line_tells_of_a_request(full: Wire) -> None:
    for path, number in ((CHAT, 1), ("/nowhere", 2), (CHAT, 3), ("/version", 4)):
        method = "POST" if path == CHAT else "GET"
        full.ask(method, path, **{"X-Request-Id": f"one-{number}"})
    log = full.log_after("one-4)")
    lines = [re.findall(rf"^.*one-{number}\)$", log, re.M) for number in (1, 2, 3, 4)]
    texts = [line.partition("] 127.0.0.1:")[2] for (line,) in lines]
    assert re.match(rf"\d+ - 429 for POST {CHAT}: rate_limit_exceeded: ", texts[0])
    assert re.match(r"\d+ - 404 for GET /nowhere: http_404: ", texts[1])
    assert re.match(rf"\d+ - 429 for POST {CHAT}: ", texts[2])
    assert re.match(r'\d+ - "GET /version HTTP/1\.1" 200 ', texts[3])


def trace(app: Any, method: str, path: str) -> tuple[int, set[str]]:
    """Return the status of a response, and the modules whose functions it took."""
    statuses, modules = [], set[str]()

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    async def receive() -> Any:
        return {"type": "http.request"}

    def note(frame: Any, event: str, argument: Any) -> None:
        modules.add(frame.f_globals.get("__name__", ""))

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    sys.setprofile(note)
    try:
        asyncio.run(app({**scope, "http_version": "1.1"}, receive, send))
    finally:
        sys.setprofile(None)
    return statuses[0], modules


def test_a_request_without_room_is_refused_before_it_is_routed(make_server: MakeServer) -> None:
    server = make_server(scheduler=SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1))
    trace(server.app, "GET", "/version")  # builds the middleware
    server.engine_client.capacity.enter(2)
    status, modules = trace(server.app, "GET", "/version")
    assert (status, "fastapi.routing" in modules) == (200, True)
    status, modules = trace(server.app, "POST", CHAT)
    assert (status, "fastapi.routing" in modules) == (429, False)
