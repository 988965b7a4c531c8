"""P0 on a Unix domain socket, with JSON lines: what an operator's proxy and log collector get."""

import contextlib
import http.client
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmjax.config.engine_config import ServerConfig
from mmjax.errors import ConfigError
from mmjax.serve import _check_certificate, _listen, _warn_if_open
from tests.test_serve import Served


class OverSocket(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def served(tiny_gemma3: Path, path: Path) -> Iterator[Served]:
    argv = ("--uds", str(path), "--log-format", "json", "--served-model-name", "tiny")
    server = Served(
        str(tiny_gemma3),
        *argv,
        *("--enable-log-requests", "--enable-log-outputs", "--max-log-len", "40"),
        module="tests.server.serve_echo",
    )
    try:
        server.wait_for(rf"mmjax serving tiny at unix:{path}\n")
        yield server
    finally:
        server.end()


def ask(path: Path, method: str, address: str, body: Any = None, **headers: str) -> int:
    connection = OverSocket(path)
    with contextlib.closing(connection):
        connection.request(method, address, json.dumps(body), headers)
        response = connection.getresponse()
        response.read()
        return response.status


def lines_of(served: Served, request_id: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in served.lines if line.startswith("{")]
    return [line for line in found if line.get("request_id") == request_id]


def check_an_answers_lines(served: Served, path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "a red circle " * 9}], "max_tokens": 4}
    headers = {"X-Request-Id": "first", "Content-Type": "application/json"}
    assert ask(path, "POST", "/v1/chat/completions", body, **headers) == 200
    served.wait_for('finished request.*"request_id": "first"')
    served.wait_for('uvicorn.access.*"request_id": "first"')
    messages = [line["message"] for line in lines_of(served, "first")]
    (received,) = [one for one in messages if one.startswith("received request chatcmpl-")]
    assert "a red circle" in received
    assert "max_tokens=4" in received
    (finished,) = [one for one in messages if one.startswith("finished request chatcmpl-")]
    assert "4 tokens (length)" in finished
    assert any("POST /v1/chat/completions" in one for one in messages)


def check_a_refusals_lines(served: Served, path: Path) -> None:
    headers = {"X-Request-Id": "second", "Content-Type": "application/json"}
    assert ask(path, "POST", "/v1/chat/completions", {"messages": 3}, **headers) == 400
    served.wait_for('400 for POST.*"request_id": "second"')
    (refused,) = lines_of(served, "second")
    assert refused["level"] == "INFO"
    assert refused["message"].startswith("- - 400 for POST /v1/chat/completions: ")
    assert "at messages" in refused["message"]


def test_every_line_is_an_object_with_its_requests_id(served: Served, path: Path) -> None:
    check_an_answers_lines(served, path)
    check_a_refusals_lines(served, path)
    assert path.is_socket()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(120) == 0
    assert not path.exists()
    for line in served.lines:
        if not line.startswith("mmjax serving "):
            assert {"time", "level", "logger", "message"} <= json.loads(line).keys()


def test_a_socket_that_is_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    _listen(ServerConfig(uds=path)).close()
    assert path.is_socket()
    with contextlib.closing(_listen(ServerConfig(uds=path))) as listener:
        listener.listen()
        with pytest.raises(ConfigError, match="cannot listen at"):
            _listen(ServerConfig(uds=path))
    other = tmp_path / "file"
    other.write_text("a file that is no socket")
    with pytest.raises(ConfigError, match="give another `--uds`"):
        _listen(ServerConfig(uds=other))
    assert other.exists()


def test_a_certificate_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    for text in (None, "no certificate"):
        if text is not None:
            certificate.write_text(text)
        with pytest.raises(ConfigError, match="give PEM files that belong together"):
            _check_certificate(ServerConfig(ssl_certfile=certificate, ssl_keyfile=certificate))


@pytest.mark.parametrize(
    ("host", "api_keys", "warns"),
    [
        ("0.0.0.0", (), True),
        ("0.0.0.0", ("a key",), False),
        ("127.0.0.1", (), False),
        ("localhost", (), False),
    ],
)
def test_a_port_that_others_may_reach_without_a_key_is_warned_of(
    host: str, api_keys: tuple[str, ...], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(host=host, port=0, api_keys=api_keys)
    with contextlib.closing(_listen(config)) as listener:
        _warn_if_open(config, listener)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warns
    assert ("listening at 0.0.0.0 without an API key" in caplog.text) == warns
