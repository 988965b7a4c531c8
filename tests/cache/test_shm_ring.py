"""Room in a ring: what goes, what stays, and that no two blocks ever overlap."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.cache.media.shm.ring import Block, Ring

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")


def nothing_stays(block: Block) -> bool:
    return True


def filled(capacity: int, *sizes: int) -> tuple[Ring[Block], list[Block]]:
    ring, blocks = Ring[Block](capacity), [Block(size) for size in sizes]
    for block in blocks:
        assert ring.place(block, nothing_stays) == []
    return ring, blocks


def places(ring: Ring[Block]) -> list[tuple[int, int]]:
    return [(block.address, block.stop) for block in ring]


def check(ring: Ring[Block]) -> None:
    """Blocks lie in order, inside, apart, and are counted."""
    at = 0
    for start, stop in places(ring):
        assert at <= start <= stop
        at = stop
    assert at <= ring.capacity
    assert ring.num_bytes == sum(block.size for block in ring)


def test_blocks_follow_each_other():
    ring, _ = filled(10, 3, 3, 4)
    assert places(ring) == [(0, 3), (3, 6), (6, 10)]
    assert ring.num_bytes == 10


def test_what_lies_there_longest_goes_first():
    ring, (a, b, c) = filled(10, 3, 3, 4)
    assert ring.place(d := Block(1), nothing_stays) == [a]
    assert ring.place(Block(2), nothing_stays) == []  # the rest of a's room
    assert ring.place(Block(3), nothing_stays) == [b]
    assert ring.place(Block(4), nothing_stays) == [c]
    assert ring.place(Block(1), nothing_stays) == [d]
    check(ring)


def test_no_block_crosses_the_end():
    ring, (a, b) = filled(10, 4, 4)
    assert ring.place(c := Block(3), nothing_stays) == [a]
    assert c.address == 0
    assert list(ring) == [c, b]


def test_a_block_that_stays_is_stepped_over():
    ring, (a, b, c) = filled(10, 3, 3, 4)
    assert ring.place(d := Block(3), lambda block: block is not a) == [b]
    assert (d.address, list(ring)) == (3, [a, d, c])
    # A round later it may go.
    assert ring.place(Block(4), nothing_stays) == [c]
    assert ring.place(Block(3), nothing_stays) == [a]


def test_what_lies_before_one_that_stays_is_not_evicted_in_vain():
    ring, (a, b, c, d) = filled(8, 2, 2, 2, 2)
    assert ring.place(Block(4), lambda block: block is not b) == [c, d]
    assert next(iter(ring)) is a


def test_without_room_nothing_changes():
    ring, (a, b, c) = filled(10, 3, 3, 4)
    assert ring.place(Block(4), lambda block: block is a) is None
    assert ring.place(Block(5), lambda block: block is not b) is None
    assert ring.place(Block(11), nothing_stays) is None
    assert list(ring) == [a, b, c]
    assert ring.place(Block(10), nothing_stays) == [a, b, c]


def test_room_may_begin_before_the_newest_block_and_end_behind_it():
    ring, (a, b, c, d) = filled(8, 2, 2, 2, 2)
    assert ring.place(e := Block(2), nothing_stays) == [a]
    assert ring.place(Block(4), lambda block: block not in (c, d)) == [e, b]
    check(ring)


def test_a_block_that_was_taken_out_leaves_room():
    ring, (a, b, c) = filled(9, 3, 3, 3)
    ring.remove(b)
    d = Block(3)
    assert ring.place(d, lambda block: False) == []
    assert d.address == 3
    for block in (a, c, d):
        ring.remove(block)
    assert ring.num_bytes == 0
    assert ring.place(Block(9), lambda block: False) == []


def test_a_ring_that_shrank_places_nothing_behind():
    ring, (a, b) = filled(10, 5, 5)
    ring.shrink(6)
    assert ring.place(c := Block(1), lambda block: block is not a) == [b]
    assert c.stop == 6
    assert ring.place(Block(7), nothing_stays) is None
    assert ring.place(Block(6), nothing_stays) == [a, c]


def has_gap(ring: Ring[Block], size: int, staying: set[Block]) -> bool:
    """Whether there is room at all, looked for the long way."""
    at = 0
    for block in ring:
        if block in staying:
            if block.address - at >= size:
                return True
            at = block.stop
    return ring.capacity - at >= size


def drive(rng: random.Random, num_operations: int, capacity: int) -> None:
    ring, staying = Ring[Block](capacity), set[Block]()
    order: list[Block] = []
    for _ in range(num_operations):
        action = rng.random()
        if action < 0.5:
            block = Block(rng.randint(1, max(1, capacity // 3)))
            could = has_gap(ring, block.size, staying)
            victims = ring.place(block, lambda one: one not in staying)
            assert (victims is not None) == could
            if victims is not None:
                assert not staying & set(victims)
                assert all(one.address < block.stop and block.address < one.stop for one in victims)
                order = [one for one in order if one not in victims] + [block]
        elif order and action < 0.75:
            staying.add(rng.choice(order))
        elif staying and action < 0.95:
            staying.discard(rng.choice([one for one in order if one in staying]))
        elif order:
            block = rng.choice(order)
            order.remove(block)
            staying.discard(block)
            ring.remove(block)
        assert set(ring) == set(order)
        check(ring)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 40))
def test_room_is_found_wherever_there_is_some(seed: int, capacity: int):
    drive(random.Random(seed), 60, capacity)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 12), capacity=st.integers(12, 40), num=st.integers(1, 60))
def test_blocks_of_one_size_go_in_the_order_in_which_they_came(size: int, capacity: int, num: int):
    ring, held = Ring[Block](capacity), list[Block]()
    for _ in range(num):
        block = Block(size)
        victims = ring.place(block, nothing_stays)
        oldest = held[:1] if len(held) == capacity // size else []
        assert victims == oldest
        held = [*held[len(oldest) :], block]


@pytest.mark.slow
def test_many_operations():
    drive(random.Random(0), 100_000, 60)
