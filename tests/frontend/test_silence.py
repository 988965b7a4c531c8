"""Silence counts while somebody is awake to hear it."""

import pytest

from mmjax.frontend.engine_client.silence import Silence


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def silence(clock: Clock) -> Silence:
    return Silence(timeout_s=60.0, clock=clock)


def turns_until_too_long(silence: Silence, clock: Clock, *, lasting_s: float) -> int:
    for number in range(1, 1000):
        clock.now += lasting_s
        if silence.take_turn():
            return number
    raise AssertionError("never too long")


def test_a_silence_while_awake_is_found(silence: Silence, clock: Clock) -> None:
    assert turns_until_too_long(silence, clock, lasting_s=silence.turn_s) == 61
    silence.end()
    assert not silence.is_too_long
    assert turns_until_too_long(silence, clock, lasting_s=silence.turn_s) == 61


def test_a_slow_loop_finds_it_too(silence: Silence, clock: Clock) -> None:
    assert turns_until_too_long(silence, clock, lasting_s=5 * silence.turn_s) == 61


@pytest.mark.parametrize("timeout_s", [0.2, 1.0, 60.0])
def test_a_sleep_of_ones_own_is_one_turn(timeout_s: float, clock: Clock) -> None:
    silence = Silence(timeout_s=timeout_s, clock=clock)
    clock.now += silence.turn_s
    assert not silence.take_turn()
    clock.now += 3600.0
    assert not silence.is_too_long
    assert not silence.take_turn()
    assert silence.seconds <= 2 * silence.turn_s


def test_what_was_said_during_the_sleep_is_heard_before_the_verdict(
    silence: Silence, clock: Clock
) -> None:
    for _ in range(59):
        clock.now += silence.turn_s
        assert not silence.take_turn()
    clock.now += 3600.0
    assert not silence.take_turn(), "late for the first time: its mail is not read yet"
    silence.end()
    clock.now += silence.turn_s
    assert not silence.take_turn()
    assert silence.seconds == pytest.approx(silence.turn_s)
