"""Lines of one form, none longer than it should be."""

import ast
import io
import itertools
import json
import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from mmjax.system.logger import (
    MAX_SILENCE_S,
    REQUEST_ID,
    Silence,
    configure_http_logging,
    configure_logging,
    reporting,
)

ENGINE = Path(__file__).parents[1] / "mmjax" / "engine"


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What mmjax's and uvicorn's loggers write; they are as before afterwards."""
    names = ("mmjax", "uvicorn", "uvicorn.access", "uvicorn.error")
    loggers = [logging.getLogger(name) for name in names]
    before = [(item.handlers, item.filters, item.propagate, item.level) for item in loggers]
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    configure_logging(process="P0")
    configure_http_logging(process="P0")
    logging.getLogger("uvicorn").setLevel("INFO")
    for name in ("uvicorn.access", "uvicorn.error"):
        # A server that another test ran in this process, with an access log switched off.
        logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger(name).propagate = True
    yield written
    for item, (handlers, filters, propagate, level) in zip(loggers, before, strict=True):
        item.handlers, item.filters, item.propagate = handlers, filters, propagate
        item.setLevel(level)


@pytest.mark.parametrize("seed", range(20))
def test_no_silence_lasts_three_seconds_and_nothing_else_is_reported(seed: int) -> None:
    """In a time of its own, that passes while somebody waits: however slow the machine is."""
    rng = random.Random(seed)
    end = rng.uniform(5.0, 90.0)
    own = sorted(rng.uniform(0.0, end) for _ in range(rng.randint(0, 25)))
    now, said = 0.0, [(0.0, "the start")]

    def say(record: logging.LogRecord) -> bool:
        said.append((now, record.getMessage()))
        return False

    def wait(seconds: float) -> bool:
        nonlocal now
        turn = now + max(seconds, 1e-6)  # a clock goes on
        while own and own[0] <= turn:
            now = own.pop(0)
            logger.info("a line")
        now = max(now, min(turn, end))
        return now >= end

    logger = logging.getLogger(f"mmjax.slow{seed}")
    logger.setLevel("INFO")
    silence = Silence(logger, lambda: "busy", interval_s=MAX_SILENCE_S, clock=lambda: now)
    logger.addFilter(silence.note)
    logger.addFilter(say)
    silence.report_until(wait)
    times = [time for time, _ in said]
    gaps = [after - before for before, after in itertools.pairwise([*times, end])]
    assert max(gaps) <= MAX_SILENCE_S + 1e-5 < 3.0
    for gap, (time, text) in zip(gaps, said[1:], strict=False):
        if text != "a line":
            assert gap >= MAX_SILENCE_S - 1e-9
            assert text == f"busy; {time:.0f} s so far"


def test_silence_is_reported_until_its_end(stream: io.StringIO) -> None:
    logger = logging.getLogger("mmjax.slow")
    reported = threading.Event()
    with reporting(logger, lambda: "busy" if not reported.set() else "", interval_s=0.01):
        assert reported.wait(60)
    count = stream.getvalue().count("busy; 0 s so far")
    assert count >= 1
    assert not logger.filters
    assert not [thread for thread in threading.enumerate() if thread.name == "report"]


def test_a_hidden_report_comes_no_more_often() -> None:
    """A level hides records before filters see them, as it does in whose program LLM is used."""
    logger = logging.getLogger("mmjax.hidden")
    logger.setLevel("WARNING")
    num_described = 0

    def describe() -> str:
        nonlocal num_described
        num_described += 1
        return "busy"

    with reporting(logger, describe, interval_s=0.05):
        threading.Event().wait(0.5)
    assert 1 <= num_described <= 10


def test_every_phase_of_a_start_is_reported() -> None:
    """Each that may last says what it does meanwhile; compilation does so itself."""
    tree = ast.parse((ENGINE / "start.py").read_text(encoding="utf-8"))
    phases = {
        ast.literal_eval(node.args[0]): node.args[1:]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "timed"
    }
    silent = {name for name, texts in phases.items() if not texts}
    assert len(phases) > 4
    assert silent == {"measure", "compile"}
    assert "reporting(" in (ENGINE / "device" / "compilation.py").read_text(encoding="utf-8")


def test_no_record_of_ours_has_several_lines() -> None:
    """The formatter escapes the end of a line, as what a client sent may hold one."""
    found = []
    for path in (ENGINE.parent).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
                parts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                if any(isinstance(part, str) and "\n" in part for part in parts):
                    found.append(f"{path}:{node.lineno}")
    assert found == []


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


def test_transformers_writes_no_lines_of_its_own() -> None:
    program = (
        "from mmjax.system.logger import configure_logging\n"
        "configure_logging(log_format='json')\n"
        "from transformers.utils import logging\n"
        "logging.get_logger('transformers.tokenization_utils_base').warning('too long')\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_VERBOSITY"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stderr == ""
