"""The times of a request: stages within stages, and what comes from P1."""

import pytest

from mmjax.system.request_times import RequestTimes, current_times, measuring, recording


class Clock:
    """`time.monotonic`, one second later at each call."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("mmjax.system.request_times.time.monotonic", clock)
    return clock


def test_a_stage_is_measured_without_the_stages_within_it() -> None:
    times = RequestTimes()
    with recording(times), measuring("process"):
        with measuring("tokenize"):
            pass
        with measuring("decode"), measuring("queue"):
            pass
    assert (times.tokenize, times.queue, times.decode) == (1.0, 1.0, 2.0)
    assert times.process == 7.0 - 1.0 - 3.0
    assert times.total == sum(times.by_stage().values()) == 7.0


def test_what_fails_took_its_time_too() -> None:
    times = RequestTimes(fetch=2.0)
    with pytest.raises(ZeroDivisionError), recording(times), measuring("fetch"):
        raise ZeroDivisionError
    assert times.fetch == 3.0


def test_outside_of_a_request_nothing_is_kept() -> None:
    with measuring("decode"):
        assert current_times() is not current_times()
    times = RequestTimes()
    with recording(times):
        assert current_times() is times
    assert times.total == 0.0


def test_the_wait_for_a_thread_is_a_queue() -> None:
    times = RequestTimes(arrived_at=10.0, fetch=2.0)
    times.wait_until(15.0)
    times.wait_until(15.0)
    assert times.queue == 3.0


def test_tokens_and_the_engines_stages() -> None:
    times = RequestTimes(queue=1.0)
    times.note_token(5.0)
    times.add_engine(RequestTimes(queue=2.0, encode=3.0, prefill=1.0))
    times.note_token(8.0)
    times.add_engine(RequestTimes(queue=1.5, encode=1.0, prefill=4.0))
    assert (times.first_token_at, times.last_token_at, times.generate) == (5.0, 8.0, 3.0)
    assert (times.queue, times.encode, times.prefill) == (3.0, 3.0, 4.0)
    times.add_engine(RequestTimes(queue=2.5))
    assert times.queue == 3.5
