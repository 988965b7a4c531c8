"""Which blocks of the paged KV cache are free. Block ids in, block ids out; knows no device."""

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Hands out block ids and counts references; the block freed longest ago is reused first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The held share of the pool, between 0 and 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks, those freed longest ago first; there must be room."""
        assert num_blocks <= len(self._free), f"{num_blocks=} {len(self._free)=}"
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, also to one that waits in the free queue."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each block, in this order; the first is reused first."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"{block_id=} is free already"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
