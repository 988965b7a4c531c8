"""Lines of one form, none longer than it should be."""

import io
import json
import logging
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from mmjax.logger import REQUEST_ID, configure_http_logging, configure_logging, reporting


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What mmjax's and uvicorn's loggers write; they are as before afterwards."""
    names = ("mmjax", "uvicorn", "uvicorn.access", "uvicorn.error")
    loggers = [logging.getLogger(name) for name in names]
    before = [(item.handlers, item.filters, item.propagate, item.level) for item in loggers]
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    configure_logging(process="P0")
    configure_http_logging(process="P0", quiet_paths=["/health"])
    logging.getLogger("uvicorn").setLevel("INFO")
    for name in ("uvicorn.access", "uvicorn.error"):
        # A server that another test ran in this process, with an access log switched off.
        logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger(name).propagate = True
    yield written
    for item, (handlers, filters, propagate, level) in zip(loggers, before, strict=True):
        item.handlers, item.filters, item.propagate = handlers, filters, propagate
        item.setLevel(level)


def test_silence_is_reported_and_nothing_else(
    stream: io.StringIO,
) -> None:
    logger = logging.getLogger("mmjax.slow")
    with reporting(logger, lambda: "busy", interval_s=0.2):
        for _ in range(8):
            time.sleep(0.05)
            logger.info("a line")
        assert "busy" not in stream.getvalue()
        time.sleep(0.5)
    written = stream.getvalue()
    assert 1 <= written.count("busy; 1 s so far") + written.count("busy; 0 s so far") <= 2
    assert not logger.filters


def test_one_form_for_all(stream: io.StringIO) -> None:
    logging.getLogger("mmjax.server").info("one")
    logging.getLogger("uvicorn.error").info("two")
    token = REQUEST_ID.set("abc")
    logging.getLogger("mmjax.server").info("three")
    REQUEST_ID.reset(token)
    first, second, third = stream.getvalue().splitlines()
    assert first.startswith("INFO ")
    assert first.endswith(" [P0 mmjax.server] one")
    assert second.endswith(" [P0 uvicorn.error] two")
    assert third.endswith(" [P0 mmjax.server] three (request abc)")


def test_long_messages_and_tracebacks_are_cut(stream: io.StringIO) -> None:
    logging.getLogger("mmjax.server").info("%s", "x" * 10**6)
    assert len(stream.getvalue()) < 5000
    assert "more characters]" in stream.getvalue()
    try:
        raise ValueError("y" * 10**6)
    except ValueError:
        logging.getLogger("mmjax.server").exception("failed")
    assert len(stream.getvalue()) < 12_000
    assert "ValueError: yyy" in stream.getvalue()


def test_access_lines_of_quiet_paths_are_left_out(stream: io.StringIO) -> None:
    access = logging.getLogger("uvicorn.access")
    for path in ("/health", "/health?a=1", "/healthy", "/" + "a" * 10_000):
        access.info('%s - "%s %s HTTP/%s" %d', "c" * 5000, "GET", path, "1.1", 200)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert all(len(line) < 500 and line.endswith('HTTP/1.1" 200') for line in lines)


INJECTED = "abc\r\nINFO 01-01 00:00:00 [P0 mmjax.server] forged\x1b[2J\x00\u2028\x85"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_llama_cpp_log_injection(
    stream: io.StringIO, log_format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client names is within the line that names it, whatever characters it has."""
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging(process="P0", log_format=log_format)
    token = REQUEST_ID.set(INJECTED)
    logging.getLogger("mmjax.server").info("for %s", INJECTED)
    REQUEST_ID.reset(token)
    written = stream.getvalue()
    assert len(written.splitlines()) == 1
    assert written.isascii()
    assert written[:-1].isprintable()
    if log_format == "json":
        assert json.loads(written)["request_id"] == INJECTED


def test_json_lines(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging(process="P0", log_format="json")
    configure_http_logging(process="P0", log_format="json")
    token = REQUEST_ID.set("abc")
    try:
        raise ValueError("\u00e9")
    except ValueError:
        logging.getLogger("mmjax.server").exception("failed")
    REQUEST_ID.reset(token)
    logging.getLogger("uvicorn.error").info("started")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "failed"
    assert (first["level"], first["process"], first["logger"]) == ("ERROR", "P0", "mmjax.server")
    assert first["request_id"] == "abc"
    assert "ValueError: \u00e9" in first["exception"]
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert second.keys() == {"time", "level", "process", "logger", "message"}
