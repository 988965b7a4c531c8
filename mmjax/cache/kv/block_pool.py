"""The pool of KV-cache blocks: free blocks, reference counts, hashes. Block ids only; no arrays.

A full block keeps its hash after its last reference is dropped: it can be shared again until it is
allocated for something else.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from mmjax.cache.kv.block_hash import BlockHash


class BlockPool:
    """Allocates block ids, counts references, and finds blocks by hash.

    Free blocks without a hash are reused first, then those that were freed longest ago.
    """

    def __init__(
        self,
        num_blocks: int,
        note_evicted: Callable[[int, BlockHash], None] = lambda block_id, block_hash: None,
    ) -> None:
        """`note_evicted` is called with a block that is about to lose what its hash stands for."""
        self.num_blocks = num_blocks
        self._note_evicted = note_evicted
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The referenced share of the pool, between 0 and 1."""
        return 1.0 - len(self._free) / self.num_blocks

    def find_prefix(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the longest prefix that is cached; changes nothing."""
        found = []
        for block_hash in block_hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def cache(self, block_id: int, block_hash: BlockHash) -> None:
        """Register a full block's hash, unless another block has the same hash already."""
        assert self._ref_counts[block_id] > 0, f"{block_id=} is free"
        if block_hash not in self._by_hash and block_id not in self._hash_of:
            self._by_hash[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks and drop their hashes; as many must be free."""
        assert num_blocks <= len(self._free), f"{num_blocks=} {len(self._free)=}"
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            self._forget(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; free ones leave the free queue."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each block, in this order; the first is reused first."""
        unhashed = []
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"{block_id=} is free already"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._hash_of:
                    unhashed.append(block_id)
        for block_id in reversed(unhashed):
            self._free.move_to_end(block_id, last=False)

    def forget_all(self) -> None:
        """Drop all hashes; references stay."""
        self._by_hash.clear()
        self._hash_of.clear()

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._note_evicted(block_id, block_hash)
