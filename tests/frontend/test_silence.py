"""Silence counts only while this process was able to receive."""

import pytest

from mmjax.frontend.engine_client.liveness import SilenceTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def silence(clock: Clock) -> SilenceTimer:
    return SilenceTimer(timeout_s=60.0, clock=clock)


def turns_until_too_long(silence: SilenceTimer, clock: Clock, *, lasting_s: float) -> int:
    for number in range(1, 1000):
        clock.now += lasting_s
        if silence.tick():
            return number
    raise AssertionError("never too long")


def test_a_silence_while_awake_is_found(silence: SilenceTimer, clock: Clock) -> None:
    assert turns_until_too_long(silence, clock, lasting_s=silence.interval_s) == 61
    silence.reset()
    assert not silence.is_expired
    assert turns_until_too_long(silence, clock, lasting_s=silence.interval_s) == 61


def test_a_slow_loop_finds_it_too(silence: SilenceTimer, clock: Clock) -> None:
    assert turns_until_too_long(silence, clock, lasting_s=5 * silence.interval_s) == 61


@pytest.mark.parametrize("timeout_s", [0.2, 1.0, 60.0])
def test_a_sleep_of_ones_own_is_one_turn(timeout_s: float, clock: Clock) -> None:
    silence = SilenceTimer(timeout_s=timeout_s, clock=clock)
    clock.now += silence.interval_s
    assert not silence.tick()
    clock.now += 3600.0
    assert not silence.is_expired
    assert not silence.tick()
    assert silence.seconds <= 2 * silence.interval_s


def test_what_was_said_during_the_sleep_is_heard_before_the_verdict(
    silence: SilenceTimer, clock: Clock
) -> None:
    for _ in range(59):
        clock.now += silence.interval_s
        assert not silence.tick()
    clock.now += 3600.0
    assert not silence.tick(), "late for the first time: its messages are not read yet"
    silence.reset()
    clock.now += silence.interval_s
    assert not silence.tick()
    assert silence.seconds == pytest.approx(silence.interval_s)
