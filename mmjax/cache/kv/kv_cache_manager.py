"""The block tables of requests. Ids and counts only: no requests, no device arrays.

Requests with a common prefix share its full, computed blocks by hash. Those that were evicted may
be found in host memory, and those of other engines in a directory.

The pool of KV-cache blocks: free blocks, reference counts, hashes. Block ids only; no arrays.

A full block keeps its hash after its last reference is dropped: it can be shared again until it is
allocated for something else.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from mmjax.cache.kv.block_hash import BlockHash
from mmjax.cache.kv.block_reader import BlockReader
from mmjax.cache.kv.host_blocks import HostBlocks
from mmjax.cache.media.lru import CacheInfo
from mmjax.rounding import cdiv


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
        self.num_ever_used = 0
        """Blocks that were allocated at least once; the others were never written."""
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
            # In the order of their ids, while there are such.
            self.num_ever_used = max(self.num_ever_used, block_id + 1)
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

    def renew(self) -> None:
        """Drop all hashes, and take free blocks in the order of their ids: none is written yet."""
        self.forget_all()
        self._free = OrderedDict.fromkeys(sorted(self._free))
        in_use = (block_id for block_id, count in enumerate(self._ref_counts) if count)
        self.num_ever_used = 1 + max(in_use, default=-1)

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._note_evicted(block_id, block_hash)


class BlockCopy(NamedTuple):
    """A block of the device that is copied to a slot of host memory."""

    block_id: int
    slot: int
    block_hash: BlockHash


BlockSource = int | memoryview
"""Where a block is copied from: a slot of host memory, or what was read from a directory."""


class KVCacheManager:
    """Allocates and frees the block table of every request.

    A request of an encoder-decoder model has a second table, for cross-attention's keys and values:
    allocated at once, never shared, from the same pool.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_encoder_len: int = 0,
        host: HostBlocks | None = None,
        reader: BlockReader | None = None,
    ) -> None:
        """`host`: of blocks that are copied to host memory when they are evicted; None: none.

        `reader`: of a directory, to which all blocks are copied as soon as they are full.
        """
        self.host = host
        self._reader = reader
        self._unsaved: dict[BlockHash, int] = {}
        """Blocks that have got a hash since the last `pop_copied`, with a directory."""
        self._evicted: list[tuple[int, BlockHash]] = []
        """Blocks that were evicted since the last `pop_copied`, and their hashes."""
        self._num_restored = 0
        """Slots that were chosen to be copied back since then."""
        self._to_restore: dict[str, list[BlockHash]] = {}
        """request_id -> hashes of the blocks behind its shared ones that were found elsewhere."""
        self.block_size = block_size
        self.max_blocks = cdiv(max_model_len, block_size)
        self.max_encoder_blocks = cdiv(max_encoder_len, block_size)
        self._pool = (
            BlockPool(num_blocks) if host is None else BlockPool(num_blocks, self._note_evicted)
        )
        self._block_ids: dict[str, list[int]] = {}
        self._tables: dict[str, np.ndarray] = {}
        """request_id -> int32[max_blocks]; unused entries are 0."""
        self._encoder_block_ids: dict[str, list[int]] = {}
        self._encoder_tables: dict[str, np.ndarray] = {}
        """request_id -> int32[max_encoder_blocks], of an encoder-decoder model's requests."""
        self._num_hashed: dict[str, int] = {}
        """request_id -> number of its first blocks whose hashes are registered."""
        self.prefix_info = CacheInfo(0, 0)
        """Prompt tokens found in the prefix cache, and looked up, of all admitted requests."""
        self.host_info = CacheInfo(0, 0)
        """Tokens of these, and of requests that were preempted, that host memory or a directory
        had, of those that the device had not."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_blocks

    @property
    def num_ever_used(self) -> int:
        """Blocks that were allocated at least once."""
        return self._pool.num_ever_used

    @property
    def num_free_blocks(self) -> int:
        """Blocks without a reference."""
        return self._pool.num_free_blocks

    @property
    def usage(self) -> float:
        """The referenced share of all blocks, between 0 and 1."""
        return self._pool.usage

    def count_cached_tokens(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int
    ) -> int:
        """Return how many of a request's first tokens are in cached blocks; changes nothing.

        Blocks of the device, and behind them those of host memory, or read for it. The last of its
        `num_tokens` never counts: its logits are needed, so it must be computed.
        """
        limit = max(0, num_tokens - 1) // self.block_size
        num_found = len(self._pool.find_prefix(block_hashes[:limit]))
        num_found += len(self._find_sources(request_id, block_hashes[num_found:limit]))
        return num_found * self.block_size

    def _find_sources(
        self, request_id: str, block_hashes: Sequence[BlockHash]
    ) -> list[BlockSource]:
        """Return where the longest prefix is copied from."""
        if self.host is None:
            return []
        read = {} if self._reader is None else self._reader.get(request_id)
        sources: list[BlockSource] = []
        for block_hash in block_hashes:
            slot = self.host.find(block_hash)
            source = read.get(block_hash) if slot is None else slot
            if source is None:
                break
            sources.append(source)
        return sources

    def start(self, request_id: str, block_hashes: Sequence[BlockHash] = ()) -> int:
        """Open a request's block table with the cached blocks of `block_hashes`.

        What the device lacks gets no blocks yet: `allocate_slots`, then `restore_blocks`.

        Returns:
            How many tokens these blocks hold.
        """
        assert request_id not in self._tables, f"{request_id=} holds blocks already"
        shared = self._pool.find_prefix(block_hashes)
        self._pool.share(shared)
        self._block_ids[request_id] = shared
        self._num_hashed[request_id] = len(shared)
        table = self._tables[request_id] = np.zeros(self.max_blocks, np.int32)
        table[: len(shared)] = shared
        num_found = len(shared)
        if self.host is not None:
            num_found += len(self._find_sources(request_id, block_hashes[num_found:]))
            self._to_restore[request_id] = list(block_hashes[len(shared) : num_found])
        return num_found * self.block_size

    def restore_blocks(self, request_id: str, num_asked: int) -> list[tuple[BlockSource, int]]:
        """Return what is to be copied to the device for a request that starts, and to which blocks.

        Before the next step. `num_asked`: tokens that the request was looked up for.
        """
        hashes = self._to_restore.pop(request_id, [])
        if self.host is None:
            return []
        first = self._num_hashed[request_id]
        block_ids = self._block_ids[request_id][first : first + len(hashes)]
        sources = self._find_sources(request_id, hashes)
        self.host.touch(hashes)
        if self._reader is not None:
            self._reader.drop(request_id)
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            self._pool.cache(block_id, block_hash)
        self._num_hashed[request_id] += len(hashes)
        self._num_restored += sum(isinstance(source, int) for source in sources)
        info, size = self.host_info, self.block_size
        self.host_info = CacheInfo(
            info.hits + len(hashes) * size, info.total + num_asked - first * size
        )
        return list(zip(sources, block_ids, strict=True))

    def is_read(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        *,
        is_idle: bool = False,
    ) -> bool:
        """Return whether a directory has no more for a request that waits; begin to read it.

        `is_idle`: nothing runs meanwhile.
        """
        reader = self._reader
        if reader is None or not block_hashes:
            return True
        if not reader.has_begun(request_id):
            num_found = self.count_cached_tokens(request_id, block_hashes, num_tokens)
            num_found //= self.block_size
            limit = max(0, num_tokens - 1) // self.block_size
            if num_found >= min(limit, len(block_hashes)):
                return True
            reader.begin(request_id, block_hashes[num_found:limit], is_idle=is_idle)
        return reader.is_done(request_id)

    @property
    def pending(self) -> list[Future[Any]]:
        """What is being read from a directory."""
        return [] if self._reader is None else self._reader.pending

    def forget_request(self, request_id: str) -> None:
        """Drop what is kept of a request from before it starts until it ends."""
        if self._reader is not None:
            self._reader.forget(request_id)

    def leave_directory(self) -> None:
        """Read and write no directory any more. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None
        self._unsaved.clear()

    def pop_copied(self) -> list[BlockCopy]:
        """Return what is to be copied to host memory: blocks, and the slots they are copied to.

        Those that were evicted since the last call, before anything is written to them; with a
        directory, those that were filled, too, which were computed by former steps. They are
        found by hash from now on. No slot is among them that was to be restored meanwhile: if there
        are fewer others than evicted blocks, the first, which are the ends of prefixes, are lost.
        """
        if self.host is None:
            return []
        filled = [(block_id, block_hash) for block_hash, block_id in self._unsaved.items()]
        blocks = [*self._evicted, *filled]
        num_lost = max(0, len(blocks) + self._num_restored - self.host.num_slots)
        self._evicted.clear()
        self._unsaved.clear()
        self._num_restored = 0
        copied = []
        for block_id, block_hash in blocks[num_lost:]:
            slot = self.host.keep(block_hash)
            if slot is not None:
                copied.append(BlockCopy(block_id, slot, block_hash))
        return copied

    def _note_evicted(self, block_id: int, block_hash: BlockHash) -> None:
        self._evicted.append((block_id, block_hash))

    def note_prefix(self, num_found: int, num_asked: int) -> None:
        """Add an admitted request's prompt tokens to `prefix_info`."""
        info = self.prefix_info
        self.prefix_info = CacheInfo(info.hits + num_found, info.total + num_asked)

    def cache_blocks(
        self, request_id: str, block_hashes: Sequence[BlockHash], num_computed: int
    ) -> None:
        """Register the hashes of the full blocks of a request's first `num_computed` tokens."""
        full = min(num_computed // self.block_size, len(block_hashes))
        block_ids = self._block_ids[request_id]
        for index in range(self._num_hashed[request_id], full):
            self._pool.cache(block_ids[index], block_hashes[index])
            if self._reader is not None:
                self._unsaved[block_hashes[index]] = block_ids[index]
        self._num_hashed[request_id] = max(full, self._num_hashed[request_id])

    def reset_prefix_cache(self, *, keeps_host: bool = False) -> None:
        """Drop all hashes; requests keep their blocks. `keeps_host`: but those of host memory."""
        self._pool.forget_all()
        self._evicted.clear()
        self._unsaved.clear()
        self._num_restored = 0
        if self.host is not None and not keeps_host:
            self.host.forget_all()

    def renew_blocks(self) -> None:
        """Begin again with blocks that were never written, as their arrays are allocated anew."""
        self._pool.renew()

    def has_room(self, request_id: str, num_tokens: int) -> bool:
        """Return whether `allocate_slots` would succeed."""
        num_new = cdiv(num_tokens, self.block_size) - len(self._block_ids[request_id])
        return num_new <= self._pool.num_free_blocks

    def allocate_slots(self, request_id: str, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens; False, without change, if full."""
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
        """Allocate blocks for all encoder hidden states; False: full, nothing changed."""
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
        """Return a request's cross-attention table, int32[max_encoder_blocks]; read-only."""
        table = self._encoder_tables.get(request_id)
        return np.zeros(self.max_encoder_blocks, np.int32) if table is None else table

    def get_block_table(self, request_id: str) -> np.ndarray:
        """Return a request's table, int32[max_blocks]; read-only, and changed by later calls."""
        return self._tables[request_id]

    def free(self, request_id: str) -> None:
        """Free a request's blocks, last first, so that its prefix is evicted last."""
        self._tables.pop(request_id, None)
        self._to_restore.pop(request_id, None)
        self._num_hashed.pop(request_id, None)
        self._encoder_tables.pop(request_id, None)
        self._pool.free(reversed(self._encoder_block_ids.pop(request_id, [])))
        self._pool.free(reversed(self._block_ids.pop(request_id, [])))
