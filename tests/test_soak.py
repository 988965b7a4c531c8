"""A short soak of a real server, and what its verdict is worth."""

import math
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.mixed_requests import Outcome
from benchmarks.process_figures import ROLES, ProcessFigures, Role, SegmentFigures
from benchmarks.soak_report import Record, Sample, find_unexpected_lines, judge, plot, report
from tests.test_serve import FEW

MIB = 2**20
SECONDS = 600.0


def make_record(change: Callable[[float], dict[str, Any]] = lambda at_s: {}) -> Record:
    """Return what a run of ten minutes saw; `change` replaces figures of P0 at a time."""
    record = Record(exit_code=0, kills_s=[150.0])
    for number in range(120):
        at_s = 5.0 * number
        plain = ProcessFigures(1, 200 * MIB + number % 7 * 2**18, 150 * MIB, 40 + number % 2, 20)
        changes = change(at_s)
        segments = SegmentFigures(changes.pop("num_segments", 1), 5 * MIB)
        processes: dict[Role, ProcessFigures] = dict.fromkeys(ROLES, plain)
        processes["P0"] = plain._replace(**changes)
        record.samples.append(Sample(at_s, processes, segments, number % 6 == 0, int(at_s > 150)))
        for ending in ("answered", "refused", "left"):
            record.outcomes.append((at_s, Outcome("kind", ending, 0.1 * (number % 5 + 1))))
    return record


def failed(record: Record) -> list[str]:
    checks = judge(record, seconds=SECONDS, max_growth_bytes=16 * MIB)
    return [check.name for check in checks if not check.is_passed]


def test_a_flat_run_passes() -> None:
    assert failed(make_record()) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda at_s: {"rss_bytes": int(200 * MIB + at_s * 40_000)}, "growth of P0's memory, MiB"),
        (lambda at_s: {"num_fds": 40 + int(at_s / 30)}, "growth of P0's descriptors"),
        (lambda at_s: {"num_threads": 20 + int(at_s / 30)}, "growth of P0's threads"),
        (lambda at_s: {"num_segments": 1 + int(at_s > 400)}, "growth of segments"),
    ],
)
def test_what_grows_is_found(change: Callable[[float], dict[str, Any]], name: str) -> None:
    assert failed(make_record(change)) == [name]


def test_growth_in_the_warm_up_is_none() -> None:
    def grow(at_s: float) -> dict[str, Any]:
        return {"rss_bytes": int(100 * MIB * min(1.0, at_s / 140))}

    assert failed(make_record(grow)) == []


def test_memory_that_comes_and_goes_is_no_growth() -> None:
    def swing(at_s: float) -> dict[str, Any]:
        return {"rss_bytes": int(200 * MIB + 30 * MIB * math.sin(at_s / 50))}

    assert failed(make_record(swing)) == []


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"wrong": [(1.0, "another text")]}, "wrong answers"),
        ({"not_idle": ["blocks"]}, "moments of rest at which something was held"),
        ({"exit_code": -9}, "exit status of P0"),
        ({"left_behind": ["process 3"]}, "processes and files left behind"),
        ({"log_lines": ["ERROR"]}, "unexpected errors in the log"),
    ],
)
def test_each_fault_fails_the_run(fields: dict[str, Any], name: str) -> None:
    record = make_record()
    for field, value in fields.items():
        setattr(record, field, value)
    assert failed(record) == [name]
    checks = judge(record, seconds=SECONDS, max_growth_bytes=16 * MIB)
    assert f"| {name} |" in report(record, checks, SECONDS)
    assert "FAILED" in report(record, checks, SECONDS)


def test_lines_that_a_kill_explains_are_expected() -> None:
    log = """INFO a line
ERROR 11-23 [P0] the engine process (pid 3) ended by signal SIGKILL, after 0 restarts
ERROR 11-23 [P1] a step failed
UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects"""
    assert len(find_unexpected_lines(log)) == 2


def test_an_exception_is_told_whole() -> None:
    told = """Exception in thread heartbeat:
Traceback (most recent call last):
  File "a.py", line 3, in run
    self.send()
OSError: no such thread"""
    log = f"INFO a line\n{told}\nINFO another"
    assert find_unexpected_lines(log) == told.splitlines()


def test_the_plot_has_all_panels() -> None:
    root = ET.fromstring(plot(make_record(), "a title"))
    texts = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a title" in texts
    for panel in ("RSS", "PSS", "descriptors", "threads", "shared memory", "seconds", "errors"):
        assert any(text.startswith(panel) for text in texts), panel
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) > 20


def soaked(seconds: float, *, num_clients: int) -> None:
    """Soak; verdicts are on counts, the bound of memory is for leaks of whole caches alone."""
    # Not pytest's own folder: the path of a socket is limited.
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        record = soak.run(
            [*FEW, "--mm-processor-cache-type", "shm"],
            Path(folder),
            seconds=seconds,
            num_kills=1,
            num_clients=num_clients,
            pause_s=0.5,
        )
    checks = judge(record, seconds=seconds, max_growth_bytes=256 * MIB)
    assert all(check.is_passed for check in checks), report(record, checks, seconds)


@pytest.mark.slow  # a minute of both cores; `tests/chaos` kills servers by default
@pytest.mark.timeout(1800)
def test_a_server_stays_as_it_is() -> None:
    soaked(12.0, num_clients=3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_stays_as_it_is_for_five_minutes() -> None:
    soaked(300.0, num_clients=6)
