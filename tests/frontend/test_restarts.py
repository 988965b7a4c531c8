"""P1 is started again at once, but not for ever at once."""

import pytest

from mmjax.frontend.engine_client.liveness import (
    FIRST_PAUSE_S,
    MAX_FRUITLESS_STARTS,
    MAX_PAUSE_S,
    PROGRESS_S,
    RestartBreaker,
)
from tests.frontend.test_silence import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> RestartBreaker:
    return RestartBreaker(clock)


def test_a_loop_of_crashes_is_interrupted_for_longer_and_longer(breaker: RestartBreaker) -> None:
    pauses = [breaker.note_exit() for _ in range(MAX_FRUITLESS_STARTS + 5)]
    before, after = pauses[: MAX_FRUITLESS_STARTS - 1], pauses[MAX_FRUITLESS_STARTS - 1 :]
    assert before == [0.0] * len(before)
    assert after == [FIRST_PAUSE_S * 2**number for number in range(4)] + [MAX_PAUSE_S] * 2


def test_tokens_close_it_again(breaker: RestartBreaker) -> None:
    for _ in range(3 * MAX_FRUITLESS_STARTS):
        breaker.note_ready()
        breaker.note_progress()
        assert breaker.note_exit() == 0.0


def test_a_quiet_life_is_progress(breaker: RestartBreaker, clock: Clock) -> None:
    for _ in range(3 * MAX_FRUITLESS_STARTS):
        breaker.note_ready()
        clock.now += PROGRESS_S
        assert breaker.note_exit() == 0.0


def test_being_ready_for_a_moment_is_not(breaker: RestartBreaker, clock: Clock) -> None:
    pauses = []
    for _ in range(MAX_FRUITLESS_STARTS):
        breaker.note_ready()
        clock.now += PROGRESS_S / 2
        pauses.append(breaker.note_exit())
    assert pauses[-1] == FIRST_PAUSE_S
