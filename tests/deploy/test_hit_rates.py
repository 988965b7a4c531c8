"""Eight replicas find on each level what one server with all their memory finds; simulated."""

import pytest

from benchmarks.replica_hits import LEVELS, Memory, make_load, simulate


def test_eight_replicas_hit_as_one_server_with_all_their_memory_does() -> None:
    memory = Memory()
    load = make_load(800, seed=0)
    one, eight = (simulate(number, load, memory) for number in (1, 8))
    assert eight == {level: pytest.approx(one[level], abs=0.03) for level in LEVELS}
    # All levels have something to find.
    assert min(one.values()) > 0.1
    less = simulate(8, load, Memory(*(part // 3 for part in memory)))
    assert less["device"] < one["device"] - 0.1
