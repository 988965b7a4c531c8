"""Who ended P1 is found out, and nobody else is blamed."""

import random

import pytest

from mmjax.frontend.engine_client.suspects import ExitCause, Suspects


class Engine:
    """Replays requests as P0 does; those in `poison` crash it whenever they are computed."""

    def __init__(self, ids: list[str], *, poison: set[str], cause: ExitCause = "crash") -> None:
        self.suspects = Suspects()
        self.unfinished = ids
        self.poison = poison
        self.cause: ExitCause = cause
        self.culprits: list[str] = []
        self.num_deaths = 0

    def run(self) -> None:
        """Serve until all have ended, restarting after each death."""
        while self.unfinished:
            self._live()

    def _live(self) -> None:
        running: list[str] = []
        while True:
            tried = self.suspects.on_trial
            waiting = [one for one in self.unfinished if one not in running]
            batch = waiting if tried is None else [tried]
            if not batch:
                self.unfinished = []
                return
            if self.poison & {*batch, *running}:
                self.die([*running, *batch])
                return
            running += batch
            for one in batch:
                self.suspects.clear(one)

    def die(self, computed: list[str], cause: ExitCause | None = None) -> None:
        self.num_deaths += 1
        assert self.num_deaths < 100
        culprit = self.suspects.on_exit(computed, cause or self.cause)
        if culprit is not None:
            self.culprits.append(culprit)
            self.unfinished.remove(culprit)


def names(count: int) -> list[str]:
    return [f"r{number}" for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 32])
def test_a_request_that_crashes_p1_is_found_at_its_second_death(count: int) -> None:
    for guilty in (0, count // 2, count - 1):
        engine = Engine(names(count), poison={f"r{guilty}"})
        engine.run()
        assert engine.culprits == [f"r{guilty}"]
        assert engine.num_deaths == 2


def test_several_are_found_one_after_the_other() -> None:
    engine = Engine(names(16), poison={"r3", "r4", "r15"})
    engine.run()
    assert sorted(engine.culprits) == ["r15", "r3", "r4"]
    assert engine.num_deaths == 4


def test_one_for_whose_sake_the_kernel_kills_is_found_later() -> None:
    engine = Engine(names(8), poison={"r5"}, cause="killed")
    engine.run()
    assert engine.culprits == ["r5"]
    assert engine.num_deaths == 6


def test_no_number_of_kills_between_tokens_blames_anyone() -> None:
    rng, suspects = random.Random(3), Suspects()
    for _ in range(200):
        running = rng.sample(names(32), 16)
        assert suspects.on_exit(running, "killed") is None
        assert suspects.on_trial is None
        for request_id in running:
            suspects.clear(request_id)


def test_five_kills_without_a_token_in_between_blame_no_one() -> None:
    suspects = Suspects()
    for number in range(5):
        computed = names(32) if suspects.on_trial is None else [suspects.on_trial]
        assert suspects.on_exit(computed, "killed") is None, number


def test_one_crash_is_an_accident() -> None:
    suspects = Suspects()
    assert suspects.on_exit(names(4), "crash") is None
    for request_id in names(4):
        assert suspects.on_trial == request_id
        suspects.clear(request_id)
    assert suspects.on_trial is None


def test_lost_messages_are_nobodys_fault() -> None:
    suspects = Suspects()
    for _ in range(20):
        assert suspects.on_exit(["r0"], "lost_messages") is None
    assert suspects.on_trial is None


def test_an_idle_p1_that_dies_has_no_suspects() -> None:
    suspects = Suspects()
    for _ in range(5):
        assert suspects.on_exit([], "crash") is None
    assert suspects.on_trial is None


def test_a_death_before_the_trials_turn_is_not_the_tried_ones() -> None:
    suspects = Suspects()
    suspects.on_exit(["a"], "crash")
    for _ in range(3):
        assert suspects.on_exit([], "crash") is None
    assert suspects.on_trial == "a"
    assert suspects.on_exit(["a"], "crash") == "a"
