"""How many replicas there should be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.deploy.autoscaling import ReplicaLoad, wanted_replicas


def wanted(loads: list[tuple[int, int]], current: int) -> int:
    found = [ReplicaLoad(float(running), float(waiting)) for running, waiting in loads]
    return wanted_replicas(found, current, target_num_waiting=4.0, max_num_running=8)


@pytest.mark.parametrize(
    ("loads", "current", "expected"),
    [
        pytest.param([(8, 4)], 1, 1, id="a few wait"),
        pytest.param([(8, 5)], 1, 2, id="more wait"),
        pytest.param([(8, 40)], 1, 10, id="many wait"),
        pytest.param([(8, 5)], 2, 2, id="one starts already"),
        pytest.param([(0, 0)], 2, 2, id="one that starts is not taken away"),
        pytest.param([(8, 0), (8, 0)], 2, 2, id="all run"),
        pytest.param([(2, 0), (2, 0)], 2, 1, id="half of one replica would do"),
        pytest.param([(3, 0), (2, 0)], 2, 2, id="it would not"),
        pytest.param([(0, 1), (0, 0)], 2, 2, id="nobody is taken away while one waits"),
        pytest.param([], 1, 1, id="nothing is known"),
        pytest.param([], 3, 3, id="nothing is known of three"),
        pytest.param([(0, 0)], 1, 1, id="the last one stays"),
    ],
)
def test_it_follows_what_waits(loads: list[tuple[int, int]], current: int, expected: int) -> None:
    assert wanted(loads, current) == expected


LOADS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 200)), min_size=1, max_size=6)


@given(LOADS)
def test_it_comes_to_rest(loads: list[tuple[int, int]]) -> None:
    """With a load that stays in sum, it neither swings nor runs away."""
    current = 1
    seen = [current := wanted(loads, current) for _ in range(400)]
    assert seen[-1] == seen[-2]
    assert seen == sorted(seen)
