"""Copies of KV blocks in host memory, and the copies on their way between it and the device.

A copy to the host is a program that gathers blocks before a step writes to them, and a transfer
behind it: the host takes what has arrived with a later step, and waits only for what a request asks
for, or where more is on its way than was planned.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from mmjax.cache.disk_store import DiskStore, DiskStoreStats
from mmjax.cache.kv.block_hash import BlockHash
from mmjax.cache.kv.kv_cache_manager import BlockCopy, BlockSource
from mmjax.engine.device.programs import Programs
from mmjax.layers.attention.kv_cache import KVCache
from mmjax.rounding import round_up

_T = TypeVar("_T")
_CALL_SIZES = (1, 4, 16)
"""Blocks of a call. What is moved is divided into such calls."""
_MAX_PADDING_BYTES = 2**20
"""Of a call: to move as much takes as long as another call."""
_ALIGNMENT = 64
"""Of an array's address: XLA copies others before a program of the CPU reads them."""
_MAX_FREE_STAGES = 2
"""Of each size of calls: one is filled while another is read."""


class _Copy(NamedTuple):
    """Blocks on their way to the host."""

    slots: Sequence[int]
    hashes: Sequence[BlockHash]
    arrays: Sequence[Any]
    """Of each of a block's arrays, those of all slots, and then padding, on the device."""


class _Restore(NamedTuple):
    """Blocks on their way to the device."""

    size: int
    """Of the call, in blocks."""
    stage: Sequence[np.ndarray]
    """Of each of a block's arrays, those of all blocks; read until `written` is ready."""
    written: Any


class HostPool:
    """Slots of host memory, each with room for a KV block; `HostBlocks` says what is where."""

    def __init__(
        self,
        programs: Programs,
        *,
        num_slots: int,
        max_staged: int,
        store: DiskStore | None = None,
    ) -> None:
        """`max_staged`: blocks that may be on their way in each direction, which take memory.

        `store`: of a directory, in which all that is copied is written; None: there is none.
        """
        self.store = store
        self._file_stats = DiskStoreStats()
        self._programs, self.num_slots = programs, num_slots
        self._arrays = [
            np.empty((num_slots, *one.shape), one.dtype) for one in programs.describe_block()
        ]
        self.bytes_per_block = programs.bytes_per_host_block
        self._max_staged = max(max_staged, _CALL_SIZES[-1])
        self._copies: deque[_Copy] = deque()
        self._restores: deque[_Restore] = deque()
        self._free_stages: dict[int, list[Sequence[np.ndarray]]] = {
            size: [] for size in _CALL_SIZES
        }
        """By the size of a call. Memory that was never written takes longer to write than to read
        what is written there."""
        self.copied_bytes = self.restored_bytes = 0
        self.copied_s = self.restored_s = 0.0
        """Seconds of the host."""

    def warm_up(self, kv_cache: KVCache) -> KVCache:
        """Compile all programs, over a block whose content stays, and write to stages once.

        The block is restored as if it were read from a directory.
        """
        for size in _CALL_SIZES:
            ids = self._programs.placement.give(np.zeros(size, np.int32))
            blocks = self._programs.gather_blocks(kv_cache, ids)
            content = memoryview(b"".join(np.asarray(one[0]).tobytes() for one in blocks))
            stages = [self._stack([content] * size) for _ in range(_MAX_FREE_STAGES)]
            rows = self._programs.put_blocks(stages[0])
            kv_cache, written = self._programs.scatter_blocks(kv_cache, ids, rows)
            jax.block_until_ready(written)
            self._free_stages[size] = stages
        return kv_cache

    def move(
        self,
        kv_cache: KVCache,
        copied: Sequence[BlockCopy],
        restored: Sequence[tuple[BlockSource, int]],
    ) -> KVCache:
        """Begin to copy blocks to slots, and then others to blocks, before a step.

        A block may be in both, a slot not. What was read from a directory gets no slot: memory that
        nobody has touched takes longer to write than all else of a short prompt.
        """
        start = time.perf_counter()
        self._take_arrived()
        for part, size in self._divide(copied):
            self._copy(kv_cache, part, size)
        copied_at = time.perf_counter()
        self.copied_s += copied_at - start
        if restored:
            kv_cache = self._restore(kv_cache, restored)
            self.restored_s += time.perf_counter() - copied_at
        return kv_cache

    def settle(self, *, has_failed: bool) -> None:
        """Wait for what is on its way, so that it takes no memory of the device.

        `has_failed`: drop it, since copies behind a failed step may be none.
        """
        while self._copies and not has_failed:
            self._take(self._copies.popleft())
        self._copies.clear()
        self._restores.clear()

    def close(self, *, has_failed: bool) -> None:
        """Settle, and leave the directory. Idempotent."""
        self.settle(has_failed=has_failed)
        if self.store is not None:
            self.store.close()
            self._file_stats = self.store.stats
        self.store = None

    @property
    def file_stats(self) -> DiskStoreStats:
        """What was read from the directory and written to it, also of one that was left."""
        return self._file_stats if self.store is None else self.store.stats

    def _await_slots(self, slots: set[int]) -> None:
        """Wait for what is on its way to any of some slots."""
        while any(slots.intersection(one.slots) for one in self._copies):
            self._take(self._copies.popleft())

    def _copy(self, kv_cache: KVCache, part: Sequence[BlockCopy], size: int) -> None:
        block_ids, slots, hashes = zip(*part, strict=True)
        while self._copies and self._count_copies() + size > self._max_staged:
            self._take(self._copies.popleft())
        ids = self._programs.placement.give(np.array(_pad(block_ids, size), np.int32))
        arrays = self._programs.gather_blocks(kv_cache, ids)
        for array in arrays:
            array.copy_to_host_async()
        self._copies.append(_Copy(slots, hashes, arrays))

    def _restore(self, kv_cache: KVCache, restored: Sequence[tuple[BlockSource, int]]) -> KVCache:
        self._await_slots({source for source, _ in restored if isinstance(source, int)})
        for part, size in self._divide(restored):
            sources, block_ids = zip(*part, strict=True)
            while self._restores and self._count_restores() + size > self._max_staged:
                jax.block_until_ready(self._restores[0].written)
                self._end_restore()
            stage = self._stack(_pad(sources, size))
            rows = self._programs.put_blocks(stage)
            ids = self._programs.placement.give(np.array(_pad(block_ids, size), np.int32))
            kv_cache, written = self._programs.scatter_blocks(kv_cache, ids, rows)
            self._restores.append(_Restore(size, stage, written))
            self.restored_bytes += len(sources) * self.bytes_per_block
        return kv_cache

    def _end_restore(self) -> None:
        """Take the memory of blocks that are written, for others."""
        done = self._restores.popleft()
        free = self._free_stages[done.size]
        if len(free) < _MAX_FREE_STAGES:
            free.append(done.stage)

    def _stack(self, sources: Sequence[BlockSource]) -> Sequence[np.ndarray]:
        """Copy blocks, so that what is on its way does not change with its slot."""
        free = self._free_stages[len(sources)]
        stage = free.pop() if free else self._make_stage(len(sources))
        for place, source in enumerate(sources):
            start = 0
            for array, slots in zip(stage, self._arrays, strict=True):
                row = array[place]
                stop = start + row.nbytes
                if isinstance(source, int):
                    row[...] = slots[source]
                else:
                    row[...] = np.frombuffer(source[start:stop], row.dtype).reshape(row.shape)
                start = stop
        return stage

    def _make_stage(self, size: int) -> Sequence[np.ndarray]:
        """Return memory for the blocks of a call."""
        shapes = [(size, *one.shape[1:]) for one in self._arrays]
        lengths = [
            round_up(math.prod(shape) * one.itemsize, _ALIGNMENT)
            for shape, one in zip(shapes, self._arrays, strict=True)
        ]
        memory = np.empty(sum(lengths) + _ALIGNMENT, np.uint8)
        starts = accumulate(lengths, initial=-memory.ctypes.data % _ALIGNMENT)
        return [
            np.ndarray(shape, one.dtype, memory, start)
            for shape, one, start in zip(shapes, self._arrays, starts, strict=False)
        ]

    def _divide(self, blocks: Sequence[_T]) -> Iterator[tuple[Sequence[_T], int]]:
        """Yield blocks in parts, each with the blocks of its call: the fewest calls."""
        start = 0
        while (left := len(blocks) - start) > 0:
            size = min((one for one in _CALL_SIZES if one >= left), default=_CALL_SIZES[-1])
            if (size - left) * self.bytes_per_block > _MAX_PADDING_BYTES:
                size = max(one for one in _CALL_SIZES if one <= left)
            yield blocks[start : start + size], size
            start += size

    def _count_copies(self) -> int:
        return sum(one.arrays[0].shape[0] for one in self._copies)

    def _count_restores(self) -> int:
        return sum(one.size for one in self._restores)

    def _take_arrived(self) -> None:
        while self._restores and self._restores[0].written.is_ready():
            self._end_restore()
        while self._copies and all(array.is_ready() for array in self._copies[0].arrays):
            self._take(self._copies.popleft())

    def _take(self, copy: _Copy) -> None:
        """Write blocks to their slots, and to the directory, once they are there."""
        arrays = [np.asarray(array)[: len(copy.slots)] for array in copy.arrays]
        for slots, array in zip(self._arrays, arrays, strict=True):
            slots[list(copy.slots)] = array
        if self.store is not None:
            for number, block_hash in enumerate(copy.hashes):
                rows = [array[number].reshape(-1).view(np.uint8).data for array in arrays]
                self.store.put(block_hash, rows)
        self.copied_bytes += len(copy.slots) * self.bytes_per_block


def _pad(values: Sequence[_T], size: int) -> Sequence[_T]:
    """Return values with the last one again and again: a block may be moved twice."""
    return [*values, *[values[-1]] * (size - len(values))]
