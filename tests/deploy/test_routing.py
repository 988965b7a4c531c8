"""Which replica gets a request: laws of the table, over any order of requests, deaths and loads."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.deploy.affinity import AffinityTable, RoutingConfig
from mmjax.errors import ConfigError

IDLE = {"a": 0, "b": 0, "c": 0}


def place(table: AffinityTable, key: str, loads: dict[str, int], *, now: float = 0.0) -> str:
    """Route a request with one key, as a front does."""
    chosen = table.rank([key], loads, now=now)[0]
    table.note([key], chosen, now=float(now))
    return chosen


def test_a_key_stays_where_it_was() -> None:
    table = AffinityTable()
    first = {f"key {i}": place(table, f"key {i}", IDLE) for i in range(200)}
    assert all(place(table, key, IDLE, now=1.0) == chosen for key, chosen in first.items())
    # Every replica has its share.
    assert min(Counter(first.values()).values()) > 40


def test_two_fronts_place_new_keys_alike() -> None:
    keys = [f"key {i}" for i in range(50)]
    assert [place(AffinityTable(), key, IDLE) for key in keys] == [
        place(AffinityTable(), key, IDLE) for key in keys
    ]


def test_the_first_key_that_is_known_decides() -> None:
    table = AffinityTable()
    table.note(["picture 1"], "b", now=0.0)
    table.note(["opening 1"], "c", now=0.0)
    assert table.rank(["session 9", "picture 1", "opening 1"], IDLE, now=1.0)[0] == "b"


def test_without_keys_the_least_loaded_one_is_chosen() -> None:
    assert AffinityTable().rank([], {"a": 3, "b": 1, "c": 2}, now=0.0)[0] == "b"


def test_a_new_key_goes_to_the_less_loaded_of_two() -> None:
    table = AffinityTable()
    placed = Counter(place(table, f"key {i}", {"a": 4, "b": 0}) for i in range(50))
    assert placed == {"b": 50}


def test_an_overloaded_owner_gets_a_second_one_beside_it() -> None:
    table = AffinityTable(RoutingConfig(max_load_difference=4))
    table.note(["key"], "a", now=0.0)
    assert table.rank(["key"], {"a": 3, "b": 0, "c": 1}, now=1.0)[0] == "a"
    assert place(table, "key", {"a": 4, "b": 0, "c": 1}, now=1.0) == "b"
    # From now on the less loaded of both is chosen; the third one has not seen it.
    assert table.rank(["key"], {"a": 1, "b": 2, "c": 0}, now=2.0) == ["a", "b", "c"]
    assert table.rank(["key"], {"a": 2, "b": 1, "c": 0}, now=2.0) == ["b", "a", "c"]


def test_a_death_moves_only_the_keys_of_the_dead_one() -> None:
    table = AffinityTable()
    first = {f"key {i}": place(table, f"key {i}", IDLE) for i in range(100)}
    left = {"a": 0, "b": 0}
    for key, chosen in first.items():
        now_at = place(table, key, left, now=1.0)
        assert now_at == chosen or chosen == "c"


def test_a_new_replica_gets_its_share_in_time() -> None:
    """All owners sit on the survivor; a table whose ownership never ends would leave them there."""
    table, config = AffinityTable(), RoutingConfig()
    keys = [f"key {i}" for i in range(200)]
    for key in keys:
        place(table, key, {"survivor": 0})
    both = {"survivor": 0, "new": 0}
    shortly = Counter(place(table, key, both, now=1.0) for key in keys)
    assert shortly["survivor"] == 200, "no key moves at once"
    shares = []
    for step in range(1, 8):
        now = step * config.ownership_s / 4
        shares.append(Counter(place(table, key, both, now=now) for key in keys)["new"])
    assert shares[1] == 0 < shares[3] < shares[-1], "they move one by one"
    assert 60 < shares[-1] < 140
    # And stay, though they were placed anew.
    later = 10 * config.ownership_s
    assert Counter(place(table, key, both, now=later) for key in keys)["new"] == shares[-1]


def test_one_that_failed_is_tried_last() -> None:
    table = AffinityTable()
    table.note(["key"], "a", now=0.0)
    assert table.rank(["key"], IDLE, now=1.0, avoided={"a"})[-1] == "a"
    assert table.rank(["key"], {"a": 0, "b": 90}, now=1.0, avoided={"a"}) == ["b", "a"]
    # Better one that failed than none.
    assert table.rank(["key"], {"a": 0}, now=1.0, avoided={"a"}) == ["a"]
    assert table.rank(["key"], {}, now=1.0) == []


def test_it_forgets_the_keys_that_are_not_used() -> None:
    table = AffinityTable(RoutingConfig(max_keys=10))
    for i in range(100):
        table.note(["kept", f"key {i}"], "a", now=0.0)
    assert len(table) == 10
    assert table.rank(["kept"], {"a": 0, "b": 0}, now=1.0)[0] == "a"


@pytest.mark.parametrize(
    "wrong", [{"max_load_difference": 0}, {"ownership_s": 0.0}, {"max_keys": 0}]
)
def test_a_setting_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RoutingConfig(**wrong)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 5)),
        st.tuples(st.just("end"), st.integers(0, 50)),
        st.tuples(st.just("die"), st.integers(0, 3)),
        st.tuples(st.just("join"), st.integers(0, 3)),
    ),
    max_size=120,
)


@given(EVENTS, st.integers(1, 6))
def test_whatever_happens_the_load_stays_even_and_the_order_whole(
    events: list[tuple[str, int]], difference: int
) -> None:
    table = AffinityTable(RoutingConfig(max_load_difference=difference, ownership_s=10.0))
    loads, running = {"0": 0}, []
    for now, (event, number) in enumerate(events):
        name = str(number)
        if event == "join":
            loads.setdefault(name, 0)
        elif event == "die" and len(loads) > 1 and loads.pop(name, None) is not None:
            running = [one for one in running if one != name]
        elif event == "end" and running:
            loads[running.pop(number % len(running))] -= 1
        elif event == "begin":
            ranked = table.rank([f"key {number}"], loads, now=float(now))
            assert sorted(ranked) == sorted(loads)
            chosen = ranked[0]
            # Nobody waits behind an owner while another replica has so much less to do.
            assert loads[chosen] - min(loads.values()) < difference
            table.note([f"key {number}"], chosen, now=float(now))
            loads[chosen] += 1
            running.append(chosen)
