"""What stands on a terminal while programs compile: log lines above, one bar below."""

import logging
import os
import pty
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from mmjax.engine.device.compilation import Program, compile_programs
from mmjax.logger import configure_logging, get_logger

END = "<end of the test>"


@contextmanager
def terminal() -> Iterator[int]:
    """Have stderr on a pseudo-terminal; give the end that shows what was written."""
    ours, theirs = pty.openpty()
    root = logging.getLogger("mmjax")
    before = (root.handlers, root.level, root.propagate)
    termios.tcsetwinsize(theirs, (24, 120))
    with os.fdopen(theirs, "w") as stderr, redirect_stderr(stderr):
        yield ours
    root.handlers, root.level, root.propagate = before
    os.close(ours)


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


def test_a_file_gets_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger("mmjax")
    before = (root.handlers, root.level, root.propagate)
    configure_logging("info")
    get_logger("mmjax.x").info("a line")
    root.handlers, root.level, root.propagate = before
    assert capsys.readouterr().err.startswith("INFO ")
