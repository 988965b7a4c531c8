"""Reads KV blocks from a directory for requests that wait, in a thread. Hashes and bytes only."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from mmjax.cache.kv.block_hash import BlockHash

_MAX_IDLE_S = 0.005
"""Seconds for which blocks are read in the caller's thread."""


class BlockReader:
    """Reads each request's blocks once, those of a few requests at a time."""

    def __init__(
        self,
        get: Callable[[BlockHash, memoryview], memoryview | None],
        *,
        block_bytes: int,
        max_blocks: int,
        max_requests: int,
    ) -> None:
        """`get` reads a block into `block_bytes` bytes; None: it is not there, or not right.

        `max_blocks`: of one request; `max_requests`: whose blocks are read at a time.
        """
        self._get = get
        self._block_bytes = block_bytes
        self._max_blocks, self._max_requests = max_blocks, max_requests
        self._jobs: dict[str, Future[dict[BlockHash, memoryview]] | None] = {}
        """request_id -> what reads its blocks; None: it has started with them."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mmjax-blocks")

    def has_begun(self, request_id: str) -> bool:
        """Whether a request's blocks are read, or being read."""
        return request_id in self._jobs

    def begin(
        self, request_id: str, block_hashes: Sequence[BlockHash], *, is_idle: bool = False
    ) -> None:
        """Begin to read a prefix, up to the first block that is not there, if there is room.

        `is_idle`: nobody else waits for this thread, so that it reads what it can in a moment: to
        hand a few blocks to another one takes longer than to read them.
        """
        if len(self.pending) >= self._max_requests:
            return
        blocks = self._read(list(block_hashes[: self._max_blocks]))
        read: dict[BlockHash, memoryview] = {}
        if is_idle and _take_briefly(blocks, read):
            done: Future[dict[BlockHash, memoryview]] = Future()
            done.set_result(read)
            self._jobs[request_id] = done
        else:
            self._jobs[request_id] = self._pool.submit(lambda: read | dict(blocks))

    def is_done(self, request_id: str) -> bool:
        """Whether a request's blocks are read."""
        job = self._jobs.get(request_id, self)
        return job is None or (isinstance(job, Future) and job.done())

    def get(self, request_id: str) -> Mapping[BlockHash, memoryview]:
        """Return the blocks that were read for a request which waits."""
        job = self._jobs.get(request_id)
        return job.result() if job is not None and job.done() else {}

    def drop(self, request_id: str) -> None:
        """Drop the blocks of a request that has started; none are read for it again."""
        if request_id in self._jobs:
            self._jobs[request_id] = None

    def forget(self, request_id: str) -> None:
        """Drop all about a request that has ended."""
        self._jobs.pop(request_id, None)

    def close(self) -> None:
        """Read no more. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def pending(self) -> list[Future[dict[BlockHash, memoryview]]]:
        """What is being read."""
        return [job for job in self._jobs.values() if job is not None and not job.done()]

    def _read(self, block_hashes: Sequence[BlockHash]) -> Iterator[tuple[BlockHash, memoryview]]:
        """Yield blocks up to the first that is not there, as they are read."""
        # In one piece: NumPy has large ones in pages of 2 MiB, which takes less than to have the
        # system give as much in pages of 4 KiB. What is not read takes no memory.
        memory = np.empty(len(block_hashes) * self._block_bytes, np.uint8).data
        for number, block_hash in enumerate(block_hashes):
            start = number * self._block_bytes
            content = self._get(block_hash, memory[start : start + self._block_bytes])
            if content is None:
                return
            yield block_hash, content


def _take_briefly(
    blocks: Iterable[tuple[BlockHash, memoryview]], read: dict[BlockHash, memoryview]
) -> bool:
    """Add blocks to what was read, for a moment; return whether these are all."""
    deadline = time.perf_counter() + _MAX_IDLE_S
    for block_hash, content in blocks:
        read[block_hash] = content
        if time.perf_counter() > deadline:
            return False
    return True
