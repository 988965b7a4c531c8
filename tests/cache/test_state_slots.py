"""Slots of states: those of requests, and snapshots in what is left."""

import random

import pytest

from mmjax.cache.state_slots import NO_STATE, StateSlots


def hashes(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_the_deepest_snapshot_is_found() -> None:
    slots = StateSlots(3)
    first, second = (slots.keep(one) for one in hashes("a", "c"))
    assert slots.find(hashes("a", "b", "c", "d")) == (3, second)
    assert slots.find(hashes("a", "b")) == (1, first)
    assert slots.find(hashes("x", "y")) == (0, NO_STATE)
    assert slots.find([]) == (0, NO_STATE)


def test_a_snapshot_is_kept_once() -> None:
    slots = StateSlots(2)
    assert slots.keep(b"a") != NO_STATE
    assert slots.keep(b"a") == NO_STATE
    assert slots.num_snapshots == 1


def test_the_least_recently_used_makes_room() -> None:
    slots = StateSlots(2)
    slots.keep(b"a")
    slots.keep(b"b")
    slots.find(hashes("a"))
    slots.keep(b"c")
    assert slots.find(hashes("b")) == (0, NO_STATE)
    assert slots.find(hashes("a"))[0] == 1


def test_a_request_takes_a_snapshots_slot() -> None:
    slots = StateSlots(2)
    slots.keep(b"a")
    slots.keep(b"b")
    kept = slots.find(hashes("b"))[1]
    (own,) = slots.acquire()
    assert own != kept
    assert slots.acquire() == (kept,)
    assert slots.keep(b"c") == NO_STATE
    slots.release([own])
    assert slots.keep(b"c") == own
    slots.forget_snapshots()
    assert (slots.num_running, slots.num_snapshots) == (1, 0)


@pytest.mark.parametrize("slots_per_request", [1, 3])
def test_no_slot_is_anybodys_twice(slots_per_request: int) -> None:
    most = 4 * slots_per_request + 2
    rng, slots = random.Random(0), StateSlots(most, slots_per_request)
    running: list[tuple[int, ...]] = []
    for _ in range(5000):
        if rng.random() < 0.5 and len(running) < 4:
            running.append(slots.acquire())
        elif running and rng.random() < 0.4:
            slots.release(running.pop(rng.randrange(len(running))))
        else:
            kept = slots.keep(bytes([rng.randrange(20)]))
            assert kept not in [slot for own in running for slot in own]
        taken = [slot for own in running for slot in own]
        assert len(set(taken)) == len(taken) == slots.num_running
        assert len(taken) == slots_per_request * len(running)
        assert slots.num_running + slots.num_snapshots <= most
