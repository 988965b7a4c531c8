"""Which KV blocks each request holds. Ids and counts only: no requests, no device arrays."""

from collections.abc import Sequence

import numpy as np

from mmjax.cache.block_pool import BlockPool


class KVCacheManager:
    """Grows, shows and frees the block table of every request."""

    def __init__(self, *, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.block_size = block_size
        self.max_blocks = cdiv(max_model_len, block_size)
        self._pool = BlockPool(num_blocks)
        self._block_ids: dict[str, list[int]] = {}
        self._tables: dict[str, np.ndarray] = {}
        """request_id -> int32[max_blocks]; unused entries are 0."""

    @property
    def num_blocks(self) -> int:
        """Blocks that exist."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free_blocks

    @property
    def usage(self) -> float:
        """The held share of all blocks, between 0 and 1."""
        return self._pool.usage

    def start(self, request_id: str, block_hashes: Sequence[bytes] = ()) -> int:
        """Open a request's block table; return how many of its tokens are cached already.

        `block_hashes` name the request's full blocks; until blocks are kept by hash, none is found.
        """
        assert request_id not in self._tables, f"{request_id=} holds blocks already"
        self._block_ids[request_id] = []
        self._tables[request_id] = np.zeros(self.max_blocks, np.int32)
        return 0

    def has_room(self, request_id: str, num_tokens: int) -> bool:
        """Return whether `allocate_slots` would succeed."""
        num_new = cdiv(num_tokens, self.block_size) - len(self._block_ids[request_id])
        return num_new <= self._pool.num_free_blocks

    def allocate_slots(self, request_id: str, num_tokens: int) -> bool:
        """Make room for a request's first `num_tokens` tokens; change nothing where it lacks."""
        block_ids = self._block_ids[request_id]
        num_new = cdiv(num_tokens, self.block_size) - len(block_ids)
        if num_new <= 0:
            return True
        if not self.has_room(request_id, num_tokens):
            return False
        start = len(block_ids)
        block_ids.extend(self._pool.allocate(num_new))
        self._tables[request_id][start : len(block_ids)] = block_ids[start:]
        return True

    def get_block_ids(self, request_id: str) -> list[int]:
        """Return a copy of the request's block ids, in order."""
        return list(self._block_ids[request_id])

    def get_block_table(self, request_id: str) -> np.ndarray:
        """Return the live table of a request, int32[max_blocks]; only to be read."""
        return self._tables[request_id]

    def free(self, request_id: str) -> None:
        """Return a request's blocks, last first, so that its beginning is evicted last."""
        self._tables.pop(request_id, None)
        self._pool.free(reversed(self._block_ids.pop(request_id, [])))


def cdiv(numerator: int, denominator: int) -> int:
    """Divide, rounding up."""
    return -(-numerator // denominator)
