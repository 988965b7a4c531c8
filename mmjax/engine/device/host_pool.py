"""Copies of KV blocks in host memory, and the copies on their way between it and the device.

A copy to the host is a program that gathers blocks before a step writes to them, and a transfer
behind it: the host takes what has arrived with a later step, and waits only for what a request asks
for, or where more is on its way than was planned.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mmjax.engine.device.programs import Programs
from mmjax.layers.attention.kv_cache import KVCache

_CALL_SIZES = (16, 4, 1)
"""Blocks of a call. What is moved is divided into such calls, so that nothing is padding."""


class _Copy(NamedTuple):
    """Blocks on their way to the host."""

    slots: Sequence[int]
    arrays: Sequence[Any]
    """Of each of a block's arrays, those of all slots, on the device."""


class HostPool:
    """Slots of host memory, each with room for a KV block; `HostBlocks` says what is where."""

    def __init__(self, programs: Programs, *, num_slots: int, max_staged: int) -> None:
        """`max_staged`: blocks that may be on their way in each direction, which take memory."""
        self._programs, self.num_slots = programs, num_slots
        self._arrays = [
            np.empty((num_slots, *one.shape), one.dtype) for one in programs.describe_block()
        ]
        self.bytes_per_block = programs.bytes_per_host_block
        self._max_staged = max(max_staged, _CALL_SIZES[0])
        self._copies: deque[_Copy] = deque()
        self._restores: deque[tuple[int, Any]] = deque()
        """Blocks, and what is ready when they are written."""
        self.copied_bytes = self.restored_bytes = 0
        self.copied_s = self.restored_s = 0.0
        """Seconds of the host."""

    def warm_up(self, kv_cache: KVCache) -> KVCache:
        """Compile all programs, over blocks whose content stays."""
        for size in _CALL_SIZES:
            ids = self._programs.placement.put(np.zeros(size, np.int32))
            blocks = self._programs.gather_blocks(kv_cache, ids)
            rows = self._programs.put_blocks([np.asarray(one) for one in blocks])
            kv_cache, _ = self._programs.scatter_blocks(kv_cache, ids, rows)
        return kv_cache

    def move(
        self,
        kv_cache: KVCache,
        copied: Sequence[tuple[int, int]],
        restored: Sequence[tuple[int, int]],
    ) -> KVCache:
        """Begin to copy blocks to slots, and then slots to blocks, before a step.

        A block may be in both, a slot not.
        """
        start = time.perf_counter()
        self._take_arrived()
        for part in _divide(copied):
            self._copy(kv_cache, part)
        copied_at = time.perf_counter()
        self.copied_s += copied_at - start
        if restored:
            kv_cache = self._restore(kv_cache, restored)
            self.restored_s += time.perf_counter() - copied_at
        return kv_cache

    def forget_copies(self) -> None:
        """Drop what is on its way, after a failure."""
        self._copies.clear()
        self._restores.clear()

    def _copy(self, kv_cache: KVCache, part: Sequence[tuple[int, int]]) -> None:
        block_ids, slots = zip(*part, strict=True)
        while self._copies and self._count_copies() + len(slots) > self._max_staged:
            self._take(self._copies.popleft())
        ids = self._programs.placement.put(np.array(block_ids, np.int32))
        arrays = self._programs.gather_blocks(kv_cache, ids)
        for array in arrays:
            array.copy_to_host_async()
        self._copies.append(_Copy(slots, arrays))

    def _restore(self, kv_cache: KVCache, restored: Sequence[tuple[int, int]]) -> KVCache:
        wanted = {slot for slot, _ in restored}
        while any(wanted.intersection(one.slots) for one in self._copies):
            self._take(self._copies.popleft())
        for part in _divide(restored):
            slots, block_ids = zip(*part, strict=True)
            while self._restores and self._count_restores() + len(slots) > self._max_staged:
                jax.block_until_ready(self._restores.popleft()[1])
            # Indexing by a list copies: what is on its way does not change with the slot.
            rows = self._programs.put_blocks([array[list(slots)] for array in self._arrays])
            ids = self._programs.placement.put(np.array(block_ids, np.int32))
            kv_cache, written = self._programs.scatter_blocks(kv_cache, ids, rows)
            self._restores.append((len(slots), written))
            self.restored_bytes += len(slots) * self.bytes_per_block
        return kv_cache

    def _count_copies(self) -> int:
        return sum(len(one.slots) for one in self._copies)

    def _count_restores(self) -> int:
        return sum(number for number, _ in self._restores)

    def _take_arrived(self) -> None:
        while self._restores and self._restores[0][1].is_ready():
            self._restores.popleft()
        while self._copies and all(array.is_ready() for array in self._copies[0].arrays):
            self._take(self._copies.popleft())

    def _take(self, copy: _Copy) -> None:
        """Write blocks to their slots, once they are there."""
        for slots, array in zip(self._arrays, copy.arrays, strict=True):
            slots[list(copy.slots)] = np.asarray(array)
        self.copied_bytes += len(copy.slots) * self.bytes_per_block


def _divide(pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield the pairs in parts of the calls' sizes."""
    start = 0
    while start < len(pairs):
        size = next(size for size in _CALL_SIZES if size <= len(pairs) - start)
        yield pairs[start : start + size]
        start += size
