"""What stands on a terminal while programs compile: log lines above, one bar below."""

import logging
import os
import pty
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial

import pytest

from mmjax.engine.device import compilation
from mmjax.engine.device.compilation import Program, compile_programs
from mmjax.system.logger import configure_logging, get_logger, reporting

END = "<end of the test>"


@contextmanager
def terminal() -> Iterator[int]:
    """Have stderr on a pseudo-terminal; give the end that shows what was written."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    with os.fdopen(theirs, "w") as stderr, redirect_stderr(stderr), mmjax_logger():
        yield ours
    os.close(ours)


@contextmanager
def mmjax_logger() -> Iterator[None]:
    """Let the logger be configured, and have it as it was afterwards."""
    root = logging.getLogger("mmjax")
    before = (root.handlers, root.level, root.propagate)
    try:
        yield
    finally:
        root.handlers, root.level, root.propagate = before


def read_all(screen: int) -> str:
    """Return what stderr has been given: the kernel hands it over in parts, and when it likes."""
    sys.stderr.write(END)
    sys.stderr.flush()
    written = b""
    while not written.endswith(END.encode()):
        written += os.read(screen, 2**16)
    return written.decode().removesuffix(END)


def show(written: str) -> list[str]:
    """Return the lines that a terminal shows: what is written over is gone."""
    lines, column = [""], 0
    for part in written.replace("\x1b[K", "\x00"):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
        elif part == "\x00":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


class Lowered:
    """Compiles at once, while the other process says something."""

    def lower(self, **_: object) -> "Lowered":
        return self

    def compile(self) -> "Lowered":
        get_logger("mmjax.other").warning("the other process")
        return self

    def memory_analysis(self) -> None:
        return None


def test_log_lines_stand_above_the_bar() -> None:
    with terminal() as screen:
        configure_logging("info", process="P1")
        programs = [Program(f"program {n}", Lowered(), {}) for n in range(3)]
        compile_programs(programs, num_threads=1, use_tqdm=True)
        *lines, bar, end = show(read_all(screen))
    assert [line.split()[0] for line in lines] == ["WARNING", "INFO"] * 3
    assert all("Compiling" not in line for line in lines)
    assert lines[-1].endswith("(3 of 3)")
    assert bar.startswith("Compiling: 100%")
    assert end == ""


def test_a_file_gets_lines_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have run a notebook's cells.
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with mmjax_logger():
        configure_logging("info")
        programs = [Program(f"program {n}", Lowered(), {}) for n in range(3)]
        compile_programs(programs, num_threads=1, use_tqdm=True)
    written = capsys.readouterr().err
    assert "\r" not in written
    lines = written.splitlines()
    assert [line.split()[0] for line in lines] == ["WARNING", "INFO"] * 3


def test_programs_are_counted_as_they_are_done(caplog: pytest.LogCaptureFixture) -> None:
    first_is_done = threading.Event()

    class Late(Lowered):
        def compile(self) -> Lowered:
            first_is_done.wait(60)
            return self

    programs = [Program("late", Late(), {}), Program("early", Lowered(), {})]
    with caplog.at_level(logging.INFO, "mmjax"):
        compile_programs(programs, num_threads=2, when_compiled=lambda number: first_is_done.set())
    texts = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert [(text.split()[1], text[-8:]) for text in texts] == [
        ("early", "(1 of 2)"),
        ("late", "(2 of 2)"),
    ]


def test_a_program_that_is_traced_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "reporting", partial(reporting, interval_s=0.01))

    class Slow(Lowered):
        def lower(self, **_: object) -> Lowered:
            deadline = time.monotonic() + 60
            while "so far" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
            return self

    with caplog.at_level(logging.INFO, "mmjax"):
        compile_programs([Program("a step", Slow(), {})])
    assert "tracing a step (0 of 1 done); 0 s so far" in caplog.text


def test_a_file_gets_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with mmjax_logger():
        configure_logging("info")
        get_logger("mmjax.x").info("a line")
    assert capsys.readouterr().err.startswith("INFO ")
