"""Laws of the block pool: no block is handed out twice, and all of them come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmjax.cache.kv.kv_cache_manager import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Random allocations, shares, hashes and frees against a plain account of all blocks."""

    SIZE = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        """The hash that a block got after it was handed out the last time."""

    @rule(count=st.integers(0, SIZE))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free_blocks:
            block_ids = self.pool.allocate(count)
            self.held.append(block_ids)
            for block_id in block_ids:
                self.content.pop(block_id, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.sampled_from(self.held))
        self.pool.share(block_ids)
        self.held.append(list(block_ids))

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), number=st.integers(0, 5))
    def give_hash(self, data: st.DataObject, number: int) -> None:
        block_id = data.draw(st.sampled_from([block for many in self.held for block in many]))
        block_hash = bytes([number])
        if block_hash not in self.content.values() and block_id not in self.content:
            self.content[block_id] = block_hash
        self.pool.cache(block_id, block_hash)

    @rule(numbers=st.lists(st.integers(0, 5), max_size=3))
    def take_back(self, numbers: list[int]) -> None:
        block_ids = self.pool.find_prefix([bytes([number]) for number in numbers])
        for block_id, number in zip(block_ids, numbers, strict=False):
            assert self.content[block_id] == bytes([number])
        if len(block_ids) < len(numbers):
            assert bytes([numbers[len(block_ids)]]) not in self.content.values()
        self.pool.share(block_ids)
        self.held.append(block_ids)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.content.clear()

    @rule()
    def renew(self) -> None:
        self.pool.renew()
        self.content.clear()
        in_use = {block_id for block_ids in self.held for block_id in block_ids}
        assert self.pool.num_ever_used == max(in_use, default=-1) + 1
        if self.pool.num_free_blocks:
            (first,) = self.pool.allocate(1)
            assert first == min({*range(self.SIZE)} - in_use)
            self.pool.free([first])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.free(reversed(self.held.pop(place)))

    @invariant()
    def every_block_is_held_or_free(self) -> None:
        in_use = {block_id for block_ids in self.held for block_id in block_ids}
        assert len(in_use) + self.pool.num_free_blocks == self.SIZE
        assert self.pool.usage == pytest.approx(len(in_use) / self.SIZE)
        assert len(self.pool._by_hash) == len(self.content)

    def teardown(self) -> None:
        for block_ids in self.held:
            self.pool.free(block_ids)
        assert self.pool.num_free_blocks == self.SIZE


TestPoolMachine = PoolMachine.TestCase


@given(st.lists(st.integers(1, 4), max_size=5))
def test_blocks_in_use_are_distinct(counts: list[int]) -> None:
    pool = BlockPool(20)
    block_ids = [block_id for count in counts for block_id in pool.allocate(count)]
    assert len(set(block_ids)) == len(block_ids)


def hashed(pool: BlockPool, count: int) -> list[int]:
    """Return blocks that can be found: by b"0", b"1" and so on."""
    block_ids = pool.allocate(count)
    for number, block_id in enumerate(block_ids):
        pool.cache(block_id, str(number).encode())
    return block_ids


def test_the_block_freed_longest_ago_is_reused_first() -> None:
    pool = BlockPool(4)
    first = hashed(pool, 4)
    pool.free([first[2]])
    pool.free([first[0]])
    assert pool.allocate(2) == [first[2], first[0]]


def test_what_nobody_can_ask_for_is_reused_before_what_somebody_may() -> None:
    pool = BlockPool(4)
    first = hashed(pool, 2)
    unhashed = pool.allocate(2)
    pool.free(first)
    pool.free(unhashed)
    assert pool.allocate(2) == unhashed
    assert pool.find_prefix([b"0", b"1"]) == first


def test_a_reused_block_is_found_no_more() -> None:
    pool = BlockPool(2)
    pool.free(reversed(hashed(pool, 2)))
    pool.allocate(1)
    assert len(pool.find_prefix([b"0", b"1"])) == 1
    pool.allocate(1)
    assert pool.find_prefix([b"0", b"1"]) == []
    assert len(pool._by_hash) == 0


def test_of_two_equal_blocks_the_first_one_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, b"x")
    pool.cache(second, b"x")
    assert pool.find_prefix([b"x"]) == [first]
    pool.free([second])
    assert pool.allocate(1) == [second]
    assert pool.find_prefix([b"x"]) == [first]


def test_a_waiting_block_can_be_taken_back() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.free([block_id])
    pool.share([block_id])
    assert pool.num_free_blocks == 1
    assert pool.allocate(1) != [block_id]


def test_freeing_a_free_block_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="free already"):
        BlockPool(2).free([0])
