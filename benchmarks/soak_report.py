"""What a soak has seen: its record, the verdict, and the plot."""

import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lines import LinePanel, Points, draw_lines
from benchmarks.mixed_requests import Outcome
from benchmarks.process_figures import ROLES, ProcessFigures, Role, SegmentFigures

WARM_UP = 0.25
"""The share of the time that is not judged."""
MAX_MORE_FDS = 4
MAX_MORE_THREADS = 8
"""Pools start their threads one by one, as they are needed."""

_MIB = 2**20
_EXPECTED_LINES = ("ended by signal SIGKILL",)


class Sample(NamedTuple):
    """The server at one moment."""

    at_s: float
    processes: Mapping[Role, ProcessFigures]
    segments: SegmentFigures
    is_quiet: bool
    """Whether nobody asked for anything, and P1 had compiled all its programs."""
    num_restarts: int


class Check(NamedTuple):
    """One line of the verdict."""

    name: str
    value: float
    limit: float

    @property
    def is_passed(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit


@dataclass
class Record:
    """All that was seen."""

    samples: list[Sample] = field(default_factory=list)
    outcomes: list[tuple[float, Outcome]] = field(default_factory=list)
    """With the second at which each ended."""
    wrong: list[tuple[float, str]] = field(default_factory=list)
    lost: list[tuple[float, str]] = field(default_factory=list)
    """What had no answer because P1 was killed."""
    kills_s: list[float] = field(default_factory=list)
    not_idle: list[str] = field(default_factory=list)
    exit_code: int | None = None
    left_behind: list[str] = field(default_factory=list)
    log_lines: list[str] = field(default_factory=list)
    """Errors in the log that no kill explains."""


# ---- the verdict ---------------------------------------------------------------------------------


def judge(record: Record, *, seconds: float, max_growth_bytes: float) -> list[Check]:
    """Return all checks of a run."""
    judged = [one for one in record.samples if one.is_quiet and one.at_s >= WARM_UP * seconds]
    last_life = [one for one in judged if one.num_restarts == len(record.kills_s)]
    assert len(judged) > 1, "the run was too short to judge"
    assert len(last_life) > 1, "P1 was killed too late to judge its memory"
    segments = [(one.at_s, float(one.segments.num_files)) for one in judged]
    kinds = Counter(outcome.ending for _, outcome in record.outcomes)
    checks = [
        Check("kinds of endings that did not occur", 3 - len(kinds), 0),
        Check("wrong answers", len(record.wrong), 0),
        Check("conversations lost with P1", len(record.lost), 0),
        Check("moments of rest at which something was held", len(record.not_idle), 0),
        Check("unexpected errors in the log", len(record.log_lines), 0),
        Check("exit status of P0", abs(record.exit_code or 0), 0),
        Check("processes and files left behind", len(record.left_behind), 0),
        Check("growth of segments", _growth(segments), 0),
    ]
    for role in ROLES[:3]:
        samples = last_life if role == "P1" else judged

        fds, threads, memory = (
            [(one.at_s, getattr(one.processes[role], name)) for one in samples]
            for name in ("num_fds", "num_threads", "rss_bytes")
        )
        growth = slope(memory) * (memory[-1][0] - memory[0][0])
        checks += [
            Check(f"growth of {role}'s descriptors", _growth(fds), MAX_MORE_FDS),
            Check(f"growth of {role}'s threads", _growth(threads), MAX_MORE_THREADS),
            Check(f"growth of {role}'s memory, MiB", growth / _MIB, max_growth_bytes / _MIB),
        ]
    return checks


def _growth(points: Points) -> float:
    """Return how much larger the median of the last third is than that of the first."""
    values = [value for _, value in points]
    third = max(1, len(values) // 3)
    return statistics.median(values[-third:]) - statistics.median(values[:third])


def slope(points: Points) -> float:
    """Return the median of the slopes between all pairs of points (Theil and Sen)."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0


def find_unexpected_lines(log: str) -> list[str]:
    """Return the log's lines that tell of a fault which nobody has caused; tracebacks whole."""
    marks = ("ERROR", "CRITICAL", "Traceback", "leaked", "Warning:")
    found, in_traceback = [], False
    lines = log.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        is_first = "Traceback" in line
        if is_first and before not in found:
            found.append(before)  # it says where an exception was that nobody caught
        if is_first or in_traceback or any(mark in line for mark in marks):
            found.append(line)
        in_traceback = is_first or (in_traceback and line.startswith(" "))
    return [line for line in found if line and not any(part in line for part in _EXPECTED_LINES)]


# ---- reports -------------------------------------------------------------------------------------


def plot(record: Record, title: str) -> str:
    """Return an SVG: memory, descriptors, threads and segments; latency; counts."""
    samples = record.samples

    def lines(name: str, scale: float = 1.0) -> dict[str, Points]:
        return {
            role: [(one.at_s / 60, getattr(one.processes[role], name) / scale) for one in samples]
            for role in ROLES
        }

    quiet = [one for one in samples if one.is_quiet]
    total = [(one.at_s / 60, _total_pss(one) / _MIB) for one in samples]
    at_rest = [(one.at_s / 60, _total_pss(one) / _MIB) for one in quiet]
    size = [(one.at_s / 60, one.segments.num_bytes / _MIB) for one in samples]
    number = [(one.at_s / 60, one.segments.num_files) for one in samples]
    memory = [
        LinePanel("RSS of each part in MiB", lines("rss_bytes", _MIB)),
        LinePanel("PSS of all processes in MiB", {"always": total, "at rest": at_rest}),
    ]
    held = [
        LinePanel("descriptors", lines("num_fds")),
        LinePanel("threads", lines("num_threads")),
    ]
    others = [
        LinePanel("shared memory", {"MiB": size, "segments": number}),
        LinePanel("seconds of a conversation (time to first token: of streams)", _latency(record)),
    ]
    counts = [
        LinePanel("conversations so far", _counts(record)),
        LinePanel("errors so far", _error_counts(record)),
    ]
    marks = [at_s / 60 for at_s in record.kills_s]
    return draw_lines([memory, held, others, counts], title, unit="min", marks=marks)


def _total_pss(sample: Sample) -> float:
    return sum(one.pss_bytes for one in sample.processes.values())


def _latency(record: Record) -> dict[str, Points]:
    end_s = max((at_s for at_s, _ in record.outcomes), default=1.0)
    width_s = end_s / 40
    lines: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("median", "p99", "first token, median")
    }
    for start in np.arange(0.0, end_s, width_s):
        part = [one for at_s, one in record.outcomes if start <= at_s < start + width_s]
        answered = [one.seconds for one in part if one.ending == "answered"]
        first = [one.first_s for one in part if one.first_s == one.first_s]
        middle = float(start + width_s / 2) / 60
        if answered:
            lines["median"].append((middle, float(np.quantile(answered, 0.5))))
            lines["p99"].append((middle, float(np.quantile(answered, 0.99))))
        if first:
            lines["first token, median"].append((middle, statistics.median(first)))
    return dict(lines)


def _counts(record: Record) -> dict[str, Points]:
    endings = ("answered", "refused", "left")
    return {
        ending: _steps([at_s for at_s, one in record.outcomes if one.ending == ending])
        for ending in endings
    }


def _error_counts(record: Record) -> dict[str, Points]:
    lost, wrong = ([at_s for at_s, _ in part] for part in (record.lost, record.wrong))
    end_s = record.samples[-1].at_s if record.samples else 0.0
    counted = {"lost while P1 was away": lost, "wrong": wrong, "kills of P1": record.kills_s}
    return {
        name: [(0.0, 0.0), *_steps(times), (end_s / 60, float(len(times)))]
        for name, times in counted.items()
    }


def _steps(times_s: Sequence[float]) -> Points:
    return [(at_s / 60, number + 1.0) for number, at_s in enumerate(sorted(times_s))]


def report(record: Record, checks: Sequence[Check], seconds: float) -> str:
    """Return the verdict as text."""
    lines = [
        f"{len(record.outcomes)} conversations in {seconds / 60:.1f} minutes: "
        + ", ".join(
            f"{count} {kind}"
            for kind, count in Counter(one.kind for _, one in record.outcomes).most_common()
        ),
        f"P1 was killed {len(record.kills_s)} times; while it was away, {len(record.lost)} "
        "conversations had no answer",
        "| | value | at most | |",
        "|---|---|---|---|",
    ]
    for check in checks:
        mark = "ok" if check.is_passed else "FAILED"
        lines.append(f"| {check.name} | {check.value:.4g} | {check.limit:.4g} | {mark} |")
    details = [text for _, text in record.wrong] + record.not_idle + record.left_behind
    lines += [f"! {text}" for text in [*details, *record.log_lines][:20]]
    return "\n".join(lines)


def to_json(record: Record) -> dict[str, Any]:
    """Return all that was seen."""
    return {
        **{name: value for name, value in asdict(record).items() if name != "samples"},
        "command": sys.argv[1:],
        "samples": [
            {
                **one._asdict(),
                "processes": {role: part._asdict() for role, part in one.processes.items()},
                "segments": one.segments._asdict(),
            }
            for one in record.samples
        ],
    }
