"""Which KV blocks each request holds. Ids and counts only: no requests, no device arrays.

Requests that begin alike share the blocks of their beginning: those that are full, computed, and
equal by hash.
"""

from collections.abc import Sequence

import numpy as np

from mmjax.cache.kv.block_hash import BlockHash
from mmjax.cache.kv.block_pool import BlockPool
from mmjax.cache.lru import CacheInfo
from mmjax.rounding import cdiv


class KVCacheManager:
    """Grows, shows and frees the block table of every request.

    A request of an encoder-decoder has a second table, of the encoder's keys and values: whole from
    its start, never shared. Both tables hold blocks of one pool.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, max_model_len: int, max_encoder_len: int = 0
    ) -> None:
        self.block_size = block_size
        self.max_blocks = cdiv(max_model_len, block_size)
        self.max_encoder_blocks = cdiv(max_encoder_len, block_size)
        self._pool = BlockPool(num_blocks)
        self._block_ids: dict[str, list[int]] = {}
        self._tables: dict[str, np.ndarray] = {}
        """request_id -> int32[max_blocks]; unused entries are 0."""
        self._encoder_block_ids: dict[str, list[int]] = {}
        self._encoder_tables: dict[str, np.ndarray] = {}
        """request_id -> int32[max_encoder_blocks], of requests that have an encoder's states."""
        self._num_hashed: dict[str, int] = {}
        """request_id -> blocks from the beginning that can be found by their hash, or are known."""
        self.prefix_info = CacheInfo(0, 0)
        """Prompt tokens that were found, and that were asked for, over all admitted requests."""

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

    def count_cached_tokens(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> int:
        """Return how many of a request's first tokens lie in cached blocks; changes nothing.

        The last of its `num_tokens` never counts: its logits are wanted, so it must be computed.
        """
        limit = max(0, num_tokens - 1) // self.block_size
        return len(self._pool.find_prefix(block_hashes[:limit])) * self.block_size

    def start(self, request_id: str, block_hashes: Sequence[BlockHash] = ()) -> int:
        """Open a request's block table with the cached blocks of `block_hashes`.

        Returns:
            How many of its tokens they hold: all, where `count_cached_tokens` said so just before.
        """
        assert request_id not in self._tables, f"{request_id=} holds blocks already"
        shared = self._pool.find_prefix(block_hashes)
        self._pool.share(shared)
        self._block_ids[request_id] = shared
        self._num_hashed[request_id] = len(shared)
        table = self._tables[request_id] = np.zeros(self.max_blocks, np.int32)
        table[: len(shared)] = shared
        return len(shared) * self.block_size

    def note_prefix(self, num_found: int, num_asked: int) -> None:
        """Count an admitted request's prompt tokens into `prefix_info`."""
        info = self.prefix_info
        self.prefix_info = CacheInfo(info.hits + num_found, info.total + num_asked)

    def cache_blocks(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed: int
    ) -> None:
        """Let the full blocks of a request's first `num_computed` tokens be found by others."""
        full = min(num_computed // self.block_size, len(block_hashes))
        block_ids = self._block_ids[request_id]
        for index in range(self._num_hashed[request_id], full):
            self._pool.cache(block_ids[index], block_hashes[index])
        self._num_hashed[request_id] = max(full, self._num_hashed[request_id])

    def reset_prefix_cache(self) -> None:
        """Let no block be found by its hash any more; what requests hold stays theirs."""
        self._pool.forget_all()

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

    def start_encoder(self, request_id: str, num_tokens: int) -> bool:
        """Make room for all of an encoder's states; change nothing where it lacks."""
        assert request_id in self._tables, f"{request_id=} was not started"
        assert request_id not in self._encoder_block_ids, f"{request_id=} has its encoder's blocks"
        num_new = cdiv(num_tokens, self.block_size)
        assert num_new <= self.max_encoder_blocks, f"{num_tokens=} {self.max_encoder_blocks=}"
        if num_new > self._pool.num_free_blocks:
            return False
        block_ids = self._encoder_block_ids[request_id] = self._pool.allocate(num_new)
        table = self._encoder_tables[request_id] = np.zeros(self.max_encoder_blocks, np.int32)
        table[:num_new] = block_ids
        return True

    def get_encoder_block_table(self, request_id: str) -> np.ndarray:
        """Return the table of a request's encoder states, int32[max_encoder_blocks]; to be read."""
        table = self._encoder_tables.get(request_id)
        return np.zeros(self.max_encoder_blocks, np.int32) if table is None else table

    def get_block_ids(self, request_id: str) -> list[int]:
        """Return a copy of the request's block ids, in order."""
        return list(self._block_ids[request_id])

    def get_block_table(self, request_id: str) -> np.ndarray:
        """Return the live table of a request, int32[max_blocks]; only to be read."""
        return self._tables[request_id]

    def free(self, request_id: str) -> None:
        """Return a request's blocks, last first, so that its beginning is evicted last."""
        self._tables.pop(request_id, None)
        self._num_hashed.pop(request_id, None)
        self._encoder_tables.pop(request_id, None)
        self._pool.free(reversed(self._encoder_block_ids.pop(request_id, [])))
        self._pool.free(reversed(self._block_ids.pop(request_id, [])))
