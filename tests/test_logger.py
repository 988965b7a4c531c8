"""Lines of one form, none longer than it should be."""

import io
import logging
from collections.abc import Iterator

import pytest

from mmjax.logger import REQUEST_ID, configure_http_logging, configure_logging


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What mmjax's and uvicorn's loggers write; they are as before afterwards."""
    names = ("mmjax", "uvicorn", "uvicorn.access")
    loggers = [logging.getLogger(name) for name in names]
    before = [(item.handlers, item.filters, item.propagate, item.level) for item in loggers]
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    configure_logging(process="P0")
    configure_http_logging(process="P0", quiet_paths=["/health"])
    logging.getLogger("uvicorn").setLevel("INFO")
    yield written
    for item, (handlers, filters, propagate, level) in zip(loggers, before, strict=True):
        item.handlers, item.filters, item.propagate = handlers, filters, propagate
        item.setLevel(level)


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
