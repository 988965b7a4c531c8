"""Bars where one can be drawn over itself, few lines elsewhere."""

import logging
import sys
from itertools import pairwise

import pytest

from mmjax.system.logger import MAX_SILENCE_S
from mmjax.system.progress import ProgressLines, progress

logger = logging.getLogger("mmjax.system.progress.test")


@pytest.mark.parametrize(
    ("num_parts", "seconds_each", "num_lines"),
    [(1000, 0.1, 11), (1000, 60.0, 10), (4, 60.0, 4), (100, 0.001, 0), (30, 0.1, 2)],
)
def test_work_has_few_lines(
    caplog: pytest.LogCaptureFixture, num_parts: int, seconds_each: float, num_lines: int
) -> None:
    now = 0.0
    lines = ProgressLines(logger, "loading", num_parts, clock=lambda: now)
    times = []
    with caplog.at_level(logging.INFO, "mmjax"):
        for _ in range(num_parts):
            now += seconds_each
            before = len(caplog.records)
            lines.update(1)
            times += [now] * (len(caplog.records) - before)
    assert abs(len(times) - num_lines) <= 1
    assert len(times) <= 11
    assert all(after - first >= MAX_SILENCE_S for first, after in pairwise(times[:-1]))
    if times:
        end = f"loading: 100% of {num_parts} after {now:.0f} s"
        assert caplog.records[-1].getMessage() == end


def test_bytes_have_a_unit(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    lines = ProgressLines(logger, "loading weights", 8 * 10**9, unit="B", clock=lambda: now)
    now = 12.0
    with caplog.at_level(logging.INFO, "mmjax"):
        lines.update(2 * 10**9)
    assert caplog.messages == ["loading weights: 25% of 8.00GB after 12 s"]


def test_a_bar_is_for_terminals_and_notebooks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*, is_shown: bool = True) -> str:
        with progress(logger, "requests", 2, is_shown=is_shown) as update:
            update(2)
        return capsys.readouterr().err

    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert work() == ""
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert "requests: 100%" in work()
    assert work(is_shown=False) == ""
