"""Laws of the block pool: no block is handed out twice, and all of them come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmjax.cache.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Random allocations, shares and frees against a plain count of references."""

    SIZE = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, SIZE))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free_blocks:
            self.held.append(self.pool.allocate(count))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.sampled_from(self.held))
        self.pool.share(block_ids)
        self.held.append(list(block_ids))

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


def test_the_block_freed_longest_ago_is_reused_first() -> None:
    pool = BlockPool(4)
    first = pool.allocate(4)
    pool.free([first[2]])
    pool.free([first[0]])
    assert pool.allocate(2) == [first[2], first[0]]


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
