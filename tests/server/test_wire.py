"""P0 over real sockets: bodies that never end, signals, ids, and what the log says of it all."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kit import draw
from tests.server.serve_echo import STUCK_TOKEN
from tests.test_serve import Served, message_about

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "red"}]
HEADERS = {"Content-Type": "application/json"}
EITHER = [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
"""The signals that end a server; each test starts one, and `tests/test_serve.py` sends SIGTERM."""
PROMPTLY_S = 25.0
"""Far less than the hour that a stuck prompt takes, far more than an end does."""


class Wire:
    """P0 in a process, and the port that it listens on."""

    def __init__(self, *argv: str, **options: bool) -> None:
        """Start it with `options` of `Served`."""
        self.served = Served(*argv, module="tests.server.serve_echo", **options)
        try:
            found = self.served.wait_for(r"mmjax serving \S+ at http://127\.0\.0\.1:(\d+)\n")
        except BaseException:
            self.served.end()
            raise
        self.port = int(found.group(1))

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """Return status, headers (names in lower case) and the body's JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, {**HEADERS, **headers})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return response.status, names, json.loads(response.read())
        finally:
            connection.close()

    def send(self, path: str, body: bytes, *, missing: int = 0) -> socket.socket:
        """Send a request, but for the last `missing` bytes of its body."""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(head.encode() + body[: len(body) - missing])
        return connection

    def log_after(self, mark: str) -> str:
        """Return what was logged before and with the first line that holds `mark`."""
        self.served.wait_for(re.escape(mark))
        return self.served.output


@pytest.fixture(scope="module")
def wire(tiny_gemma3: Path) -> Iterator[Wire]:
    server = Wire(str(tiny_gemma3), "--request-body-timeout", "1")
    try:
        yield server
    finally:
        server.served.end()


@pytest.fixture
def own_wire(tiny_gemma3: Path) -> Iterator[Any]:
    """Return a function that starts a server for one test, which may end it."""
    servers: list[Wire] = []

    def start(*argv: str, **options: bool) -> Wire:
        servers.append(Wire(str(tiny_gemma3), *argv, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.served.end()


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_body_that_stops_coming_gets_408(wire: Wire) -> None:
    response = read_all(wire.send(CHAT, b'{"messages": []}', missing=5))
    assert response.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in response
    assert b"connection: close" in response.lower()


def test_a_slow_body_is_read_to_its_end(wire: Wire) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
    with wire.send(CHAT, body, missing=20) as connection:
        for byte in body[-20:]:
            time.sleep(0.1)
            connection.sendall(bytes([byte]))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_every_response_bears_an_id(wire: Wire) -> None:
    ids = []
    for method, path, body in (
        ("GET", "/health", None),
        ("GET", "/nowhere", None),
        ("DELETE", CHAT, None),
        ("POST", CHAT, {"messages": MESSAGES}),
        ("POST", CHAT, {}),
        ("POST", CHAT, b"{"),
    ):
        ids.append(wire.ask(method, path, body)[1]["x-request-id"])
    assert len(set(ids)) == len(ids)
    assert wire.ask("GET", "/health", **{"X-Request-Id": "mine-1"})[1]["x-request-id"] == "mine-1"
    for bad in ("x" * 129, "tab\there", "h\u00e9"):
        assert wire.ask("GET", "/health", **{"X-Request-Id": bad})[1]["x-request-id"] != bad


def test_a_400_is_logged_with_reason_and_id_and_without_content(wire: Wire) -> None:
    content = {"model": "secret-1", "messages": [{"role": "user", "content": ["secret-2"] * 5000}]}
    wire.ask("POST", CHAT, {"messages": [], "temperature": "secret-3"}, **{"X-Request-Id": "a-1"})
    wire.ask("POST", CHAT, content, **{"X-Request-Id": "a-2"})
    wire.ask("POST", "/v1/completions", b'{"prompt": secret-4', **{"X-Request-Id": "a-3"})
    wire.ask("GET", "/version", **{"X-Request-Id": "a-4"})
    log = wire.log_after("a-4")
    (line,) = re.findall(r".* 400 for .*a-1\)", log)
    assert line.startswith("INFO ")
    assert f"POST {CHAT}: invalid_request_error at temperature: " in line
    assert re.search(r"404 for .* at model: .*a-2\)|400 for .* at messages\S* .*a-2\)", log)
    assert re.search(r"400 for .*not valid JSON.*a-3\)", log)
    assert "secret" not in log


def test_a_line_names_the_flag_that_would_allow_a_request(wire: Wire) -> None:
    body = {"messages": MESSAGES, "chat_template": "secret-5", "mm_processor_kwargs": {"a": 1}}
    wire.ask("POST", CHAT, body, **{"X-Request-Id": "f-1"})
    wire.ask("POST", "/sleep", {}, **{"X-Request-Id": "f-2"})
    log = wire.log_after("f-2")
    assert re.search(r"400 for .*start the server with `--trust-request-[a-z-]+`.*f-1\)", log)
    assert re.search(r"404 for .*start it with `--allow-engine-control`.*f-2\)", log)
    assert "secret" not in log


def test_log_injection_lines_are_short_whatever_a_client_sends(wire: Wire) -> None:
    wire.ask("GET", "/version", **{"X-Request-Id": "b-1"})
    before = len(wire.log_after("b-1"))
    body = {"messages": MESSAGES, **{f"unknown_{i}": i for i in range(40_000)}}
    wire.send(CHAT, json.dumps(body).encode()).close()
    status, _, answer = wire.ask("POST", CHAT, body)
    assert status == 400
    assert answer["error"]["param"] == "unknown_0"
    assert answer["error"]["message"].endswith("and 39997 more")
    assert wire.ask("GET", f"/{'a' * 9000}?{'b' * 9000}")[0] == 404
    long = {"X-Forwarded-For": "c" * 9000, "X-Request-Id": "b-2"}
    assert wire.ask("GET", "/version", **long)[0] == 200
    assert len(wire.log_after("b-2")) - before < 4 * 1000


def test_access_lines_have_the_one_format(wire: Wire) -> None:
    for path in ("/health", "/ready", "/version"):
        wire.ask("GET", path, **{"X-Request-Id": f"c{path}"})
    log = wire.log_after("c/version")
    form = r"^INFO \d\d-\d\d \d\d:\d\d:\d\d \[P0 uvicorn\.access\] 127\.0\.0\.1:\d+ - "
    assert re.search(form + r'"GET /version HTTP/1\.1" 200 \(request c/version\)$', log, re.M)
    assert re.search(r"^INFO .*\[P0 uvicorn\.error\] Started server process", log, re.M)
    assert "GET /health" not in log
    assert "GET /ready" not in log


def test_access_lines_are_the_operators_choice(own_wire: Any) -> None:
    wire = own_wire("--disable-access-log-for-endpoints", "/version")
    for path in ("/version", "/health"):
        wire.ask("GET", path)
    assert "GET /version" not in wire.log_after("GET /health")


# ---- ends -----------------------------------------------------------------------------------


def test_half_sent_bodies_do_not_hold_up_the_end(own_wire: Any) -> None:
    wire = own_wire("--request-body-timeout", "0", "--shutdown-timeout", "3000")
    connections = [wire.send(CHAT, b"{" + b" " * 100, missing=50) for _ in range(4)]
    wire.ask("GET", "/version")
    wire.served.process.send_signal(signal.SIGTERM)
    assert wire.served.process.wait(PROMPTLY_S) == 0
    assert all(read_all(item).startswith(b"HTTP/1.1 503 ") for item in connections)
    assert "Traceback" not in wire.served.output


@pytest.fixture
def stuck_wire(own_wire: Any, request: pytest.FixtureRequest) -> Iterator[Wire]:
    """A server one of whose threads will not end; `request.param` is its shutdown timeout."""
    wire = own_wire("--shutdown-timeout", request.param)
    body = json.dumps({"prompt": [5, STUCK_TOKEN]}).encode()
    with wire.send("/v1/completions", body):
        wire.served.wait_for("stuck")
        yield wire


@pytest.mark.parametrize("stuck_wire", ["1"], indirect=True)
def test_the_end_comes_in_time_whatever_threads_do(stuck_wire: Wire) -> None:
    stuck_wire.served.process.send_signal(signal.SIGTERM)
    assert stuck_wire.served.process.wait(PROMPTLY_S) == 0
    assert "Traceback" not in stuck_wire.served.output


@pytest.mark.parametrize("stuck_wire", ["3000"], indirect=True)
@pytest.mark.parametrize("number", EITHER)
def test_a_second_signal_ends_at_once(stuck_wire: Wire, number: int) -> None:
    process = stuck_wire.served.process
    pid = int(stuck_wire.served.wait_for(r"engine process \(pid (\d+)\)").group(1))
    process.send_signal(signal.SIGTERM)
    stuck_wire.served.wait_for("Shutting down")
    process.send_signal(number)
    assert process.wait(PROMPTLY_S) == 128 + number
    assert "Traceback" not in stuck_wire.served.output
    deadline = time.monotonic() + PROMPTLY_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the engine outlives the server"
        time.sleep(0.05)


@pytest.mark.parametrize("number", EITHER)
@pytest.mark.parametrize("mark", ["reading the configuration", "started the engine process"])
def test_signals_during_the_start_show_no_traceback(
    tiny_gemma3: Path, number: int, mark: str
) -> None:
    served = Served(str(tiny_gemma3), is_group=True)
    try:
        served.wait_for(mark)
        # As a terminal does it: to all processes of the group.
        os.killpg(served.process.pid, number)
        assert served.process.wait(PROMPTLY_S) == 128 + number
    finally:
        served.end()
    assert "before the server was ready" in served.output
    assert "Traceback" not in served.output


LOUD = ("ERROR", "CRITICAL", "Traceback", "Warning", "leaked", "Exception")


@pytest.mark.parametrize("number", EITHER)
def test_what_all_processes_get_ends_the_server_quietly(own_wire: Any, number: int) -> None:
    """As a terminal sends Ctrl-C, and a service manager SIGTERM: not to P0 alone."""
    wire = own_wire(
        *("--trust-request-chat-template", "--media-decode-workers", "2", "--shutdown-timeout"),
        *("3000", "--max-model-len", "256"),
        is_group=True,
        has_standby=True,
    )
    # Each process that a request may need has been started.
    picture = message_about(draw(30, 20, 1), "What color?")
    assert wire.ask("POST", CHAT, {"messages": [picture]})[0] == 200
    choice = {"messages": MESSAGES, "structured_outputs": {"choice": ["red", "blue"]}}
    assert wire.ask("POST", CHAT, choice)[0] == 200
    assert wire.ask("POST", CHAT, {"messages": MESSAGES, "chat_template": "red"})[0] == 200
    server = psutil.Process(wire.served.process.pid)
    processes = server.children(recursive=True)
    assert len(processes) >= 5, "P1, the next one, two decoders, and what reads grammars"
    for process in (server, *processes):
        process.send_signal(number)
    assert wire.served.process.wait(PROMPTLY_S) == 0
    assert not psutil.wait_procs(processes, timeout=PROMPTLY_S)[1]
    wire.served.wait_for("Finished server process")
    assert not [line for line in wire.served.lines if any(mark in line for mark in LOUD)]


def test_CVE_2025_48956_a_head_of_megabytes_is_refused(wire: Wire) -> None:
    for head in (b"X-A: " + b"a" * 4_000_000, b"X-B: b\r\n" * 400_000):
        with socket.create_connection(("127.0.0.1", wire.port), timeout=60) as connection:
            with contextlib.suppress(OSError):  # it is closed before all of it is sent
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert not connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert wire.ask("GET", "/health")[0] == 200
