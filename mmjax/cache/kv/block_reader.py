"""Reads KV blocks from a directory for requests that wait, in a thread. Hashes and bytes only."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from mmjax.cache.kv.block_hash import BlockHash

ReadBlocks = list[tuple[BlockHash, memoryview]]


class BlockReader:
    """Reads each request's blocks once, those of a few requests at a time."""

    def __init__(
        self,
        get: Callable[[BlockHash], memoryview | None],
        *,
        block_bytes: int,
        max_requests: int,
    ) -> None:
        """`get` reads a block of `block_bytes`; None: it is not there, or not right."""
        self._get = get
        self._block_bytes = block_bytes
        self._max_requests = max_requests
        self._jobs: dict[str, Future[ReadBlocks] | None] = {}
        """request_id -> what reads its blocks; None: they are read."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mmjax-blocks")

    def has_begun(self, request_id: str) -> bool:
        """Whether a request's blocks are read, or being read."""
        return request_id in self._jobs

    def begin(self, request_id: str, block_hashes: Sequence[BlockHash]) -> None:
        """Begin to read a prefix, up to the first block that is not there, if there is room."""
        if len(self._reading) < self._max_requests:
            self._jobs[request_id] = self._pool.submit(self._read, list(block_hashes))

    def is_done(self, request_id: str) -> bool:
        """Whether a request's blocks are read, and `pop_read` has returned them."""
        return self._jobs.get(request_id, self) is None

    def pop_read(self) -> ReadBlocks:
        """Return the blocks that were read since the last call, the first of a prefix last."""
        read: ReadBlocks = []
        for request_id, job in list(self._jobs.items()):
            if job is not None and job.done():
                self._jobs[request_id] = None
                read += reversed(job.result())
        return read

    def wait(self, timeout_s: float) -> bool:
        """Wait until something is read; False, at once, if nothing is being read."""
        reading = self._reading
        wait(reading, timeout_s, FIRST_COMPLETED)
        return bool(reading)

    def forget(self, request_id: str) -> None:
        """Drop what belongs to a request that has ended."""
        self._jobs.pop(request_id, None)

    def close(self) -> None:
        """Read no more. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def _reading(self) -> list[Future[ReadBlocks]]:
        return [job for job in self._jobs.values() if job is not None]

    def _read(self, block_hashes: Sequence[BlockHash]) -> ReadBlocks:
        read: ReadBlocks = []
        for block_hash in block_hashes:
            content = self._get(block_hash)
            if content is None or len(content) != self._block_bytes:
                break
            read.append((block_hash, content))
        return read
