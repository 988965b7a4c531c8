"""The sender cache of a processor cache in shared memory: writes an item once, sends its handle.

P0 alone decides what is cached. P1 may find an item evicted whose handle was on its way: it then
reports a miss, as for every other cache. An item for which there is no room is sent with its
tensors.
"""

import mmap
from pathlib import Path

from mmjax.cache.media.processor_cache import CacheEntry, LRUProcessorCache, SentItem
from mmjax.cache.media.shm.directory import SharedDirectory
from mmjax.cache.media.shm.layout import Plan, make_plan
from mmjax.errors import ConfigError
from mmjax.processing.prepared import ProcessedItem
from mmjax.processing.tensors.shared_item import SharedItem
from mmjax.rounding import round_up
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

MAX_OBJECT_BYTES = 128 * 2**20


class ShmObjectStoreSenderCache(LRUProcessorCache):
    """Writes items to shared memory, and makes their handles."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        max_object_bytes: int = MAX_OBJECT_BYTES,
        name: str | None = None,
        directory: Path | None = None,
    ) -> None:
        """Make the directory of items.

        Args:
            capacity_bytes: Of all items, each rounded up to pages.
            max_object_bytes: Of one; a larger one is sent with its tensors every time.
            name: By which P1 finds the directory; None: a unique one.
            directory: Where it is made; None: a private directory in shared memory.
        """
        if capacity_bytes < mmap.PAGESIZE:
            raise ConfigError(
                f"`mm_processor_cache_gb` gives {capacity_bytes} bytes of shared memory; give at "
                f"least {mmap.PAGESIZE}, or choose `--mm-processor-cache-type lru`"
            )
        super().__init__(capacity_bytes)
        self._cache.on_removed = self._remove
        self._directory = SharedDirectory.create(name, directory)
        self._max_object_bytes = max_object_bytes
        self._num_written = 0
        self._has_noted_full = self._has_noted_oversize = False

    @property
    def path(self) -> Path:
        """The directory of items."""
        return self._directory.path

    @property
    def name(self) -> str:
        """By which P1 finds the directory."""
        return self.path.name

    def reset_readers(self) -> None:
        """Do nothing: the next P1 reads the same files."""

    def close(self) -> None:
        """Remove all items and their directory; items are sent in messages from now on."""
        with self._lock:
            self.clear_cache()
            self._directory.close()

    def _store(self, mm_item: ProcessedItem, mm_hash: str) -> SentItem:
        plan = make_plan(mm_item[0])
        if plan is None or self._directory.is_closed or not self._fits(plan):
            return mm_item
        size = round_up(plan.size, mmap.PAGESIZE)
        # First, so that the files never exceed the capacity.
        self._cache.make_room(size)
        self._num_written += 1
        if not self._write(plan):
            return mm_item
        handle = SharedItem(mm_hash=mm_hash, number=self._num_written, layout=plan.layout)
        hit = (handle, mm_item[1])
        self._keep(mm_hash, size, hit)
        return hit

    def _write(self, plan: Plan) -> bool:
        """Write the file of the newest number; where memory ends, evict as much as it needs."""
        wanted = self._cache.currsize - plan.size
        while True:
            try:
                self._directory.write(self._num_written, plan.size, plan.arrays)
            except OSError as error:
                self._note_full(error)
                if not self._cache or self._cache.currsize <= wanted:
                    return False
                self._cache.popitem()
            else:
                return True

    def _remove(self, entry: CacheEntry) -> None:
        handle = entry.hit[0]
        assert isinstance(handle, SharedItem), f"{handle=}"
        self._directory.remove(handle.number)

    def _fits(self, plan: Plan) -> bool:
        size, capacity = round_up(plan.size, mmap.PAGESIZE), self._cache.capacity
        limit = min(self._max_object_bytes, capacity)
        if size > limit and not self._has_noted_oversize:
            self._has_noted_oversize = True
            flag = "shm-cache-max-object-size-mb" if limit < capacity else "processor-cache-gb"
            logger.warning(
                "an item of %d bytes is larger than shared memory takes, and goes to the engine "
                "by message every time; raise `--mm-%s`",
                *(plan.size, flag),
            )
        return size <= limit

    def _note_full(self, error: OSError) -> None:
        if not self._has_noted_full:
            self._has_noted_full = True
            logger.warning(
                "no more shared memory in `%s`: %s; the processor cache stays at about %d bytes: "
                "enlarge it, or lower `--mm-processor-cache-gb`",
                *(self.path.parent, error.strerror, self._cache.currsize),
            )
