"""The sender cache of a processor cache in shared memory: writes an item once, sends its handle.

P0 alone decides what is cached. An item is not evicted before P1 has released its handles. Eviction
is first-in, first-out. An item for which there is no room is sent with its tensors.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mmjax.cache.lru import CacheInfo
from mmjax.cache.media.processor_cache import BaseMultiModalProcessorCache, ProcessedItem, SentItem
from mmjax.cache.media.shm.files import new_segment_name
from mmjax.cache.media.shm.layout import Plan, make_plan
from mmjax.cache.media.shm.segment import PAGE
from mmjax.cache.media.shm.writer import ObjectWriter, StoredObject
from mmjax.errors import ConfigError, MultiModalCacheMissError
from mmjax.logger import get_logger
from mmjax.processing.prompt_updates.updates import ResolvedPromptUpdate
from mmjax.processing.tensors.inputs import ItemData
from mmjax.processing.tensors.shared_item import SharedItem

logger = get_logger(__name__)

MAX_OBJECT_BYTES = 128 * 2**20


class _Held(NamedTuple):
    stored: StoredObject
    updates: Sequence[ResolvedPromptUpdate]


class ShmObjectStoreSenderCache(BaseMultiModalProcessorCache):
    """Writes items to shared memory, and makes their handles. A segment has one writer.

    Every handle must reach the reader or be withdrawn: its item is not evicted before.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        max_object_bytes: int = MAX_OBJECT_BYTES,
        name: str | None = None,
        directory: Path | None = None,
    ) -> None:
        """Create the segment.

        Args:
            capacity_bytes: Of all items, each rounded up to pages.
            max_object_bytes: A larger item is sent in messages.
            name: Of the segment; None: a new one, in the attribute `name`.
            directory: Of the file, private to this user; None: in shared memory.
        """
        super().__init__()
        if capacity_bytes < PAGE:
            raise ConfigError(
                f"`mm_processor_cache_gb` gives {capacity_bytes} bytes of shared memory; give at "
                f"least {PAGE}, or choose `--mm-processor-cache-type lru`"
            )
        self.name = new_segment_name() if name is None else name
        self._writer = ObjectWriter(
            capacity_bytes, self.name, directory=directory, on_evicted=self._note_evicted
        )
        self.path = self._writer.path
        """The segment's file."""
        self._held: dict[str, _Held] = {}
        self._hash_by_object_id: dict[int, str] = {}
        self._max_object_bytes = max_object_bytes
        self._info = self._last_info = CacheInfo(0, 0)
        self._has_noted_oversize = False

    # ---- look-ups ------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Bytes that all items may take."""
        return self._writer.ring.capacity

    @property
    def currsize(self) -> int:
        """Bytes that items take, including removed ones that P1 still reads."""
        return self._writer.ring.num_bytes

    @property
    def num_in_use(self) -> int:
        """Number of items that are being written or read."""
        with self._lock:
            return sum(map(self._writer.is_in_use, self._writer.ring))

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self._held

    def list_hashes(self) -> list[str]:
        with self._lock:
            return list(self._held)

    def peek_prompt_updates(self, mm_hash: str) -> Sequence[ResolvedPromptUpdate] | None:
        held = self._held.get(mm_hash)
        return None if held is None else held.updates

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Prefer to evict other items until this one's handle is made.

        Eviction stays first-in, first-out: use does not change an item's place.
        """
        with self._lock:
            if mm_hash in self._held:
                self._held[mm_hash].stored.is_spared = True

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        with self._lock:
            info = self._info
            if not delta:
                return info
            last, self._last_info = self._last_info, info
            return info - last

    # ---- changes -------------------------------------------------------------------------------

    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> SentItem:
        """Return a handle of the cached item, or of `mm_item`; `mm_item` itself without room."""
        with self._lock:
            held = self._held.get(mm_hash)
            self._info = CacheInfo(self._info.hits + (held is not None), self._info.total + 1)
            if held is not None:
                return self._writer.make_handle(held.stored, mm_hash), held.updates
        if mm_item is None:
            raise MultiModalCacheMissError([mm_hash])
        item, updates = mm_item
        plan = make_plan(item)
        handle = self._store(plan, updates, mm_hash) if plan and self._fits(plan) else None
        return handle or item, updates

    def invalidate(self, mm_hash: str) -> None:
        with self._lock:
            if mm_hash in self._held:
                self._forget(mm_hash)

    def clear_cache(self) -> None:
        """Remove all items; the memory of those in use is freed when they are released."""
        with self._lock:
            for mm_hash in list(self._held):
                self._forget(mm_hash)

    def withdraw(self, item: ItemData) -> None:
        """Release a handle that will not be sent. Idempotent."""
        with self._lock:
            if isinstance(item, SharedItem) and not self._writer.is_closed:
                self._writer.withdraw(item)

    def reset_readers(self) -> None:
        """Release all handles after the reader died; items stay cached.

        Call it before the next reader is sent its first handle, never while a reader lives.
        """
        with self._lock:
            if not self._writer.is_closed:
                self._writer.reset_readers()

    def close(self) -> None:
        """Remove all items and the segment; items are sent in messages from now on."""
        with self._lock:
            self.clear_cache()
            self._writer.close()

    # ---- objects -------------------------------------------------------------------------------

    def _store(
        self, plan: Plan, updates: Sequence[ResolvedPromptUpdate], mm_hash: str
    ) -> SharedItem | None:
        """Write an item, and return its handle; None without room."""
        with self._lock:
            reserved = None if self._writer.is_closed else self._writer.reserve(plan)
            if reserved is None:
                return None
        stored, buffer = reserved
        try:
            # Without the lock, unless `get_and_update` holds it: a request's items are one change.
            plan.write(buffer)
        except BaseException:
            with self._lock:
                self._writer.abandon(stored)
            raise
        with self._lock:
            return self._publish(_Held(stored, updates), mm_hash)

    def _publish(self, written: _Held, mm_hash: str) -> SharedItem | None:
        if self._writer.is_closed:
            return None
        held = self._held.get(mm_hash)
        if held is not None:  # another thread was faster
            self._writer.abandon(written.stored)
            return self._writer.make_handle(held.stored, mm_hash)
        self._writer.publish(written.stored)
        self._held[mm_hash] = written
        self._hash_by_object_id[written.stored.object_id] = mm_hash
        return self._writer.make_handle(written.stored, mm_hash)

    def _forget(self, mm_hash: str) -> None:
        stored = self._held.pop(mm_hash).stored
        del self._hash_by_object_id[stored.object_id]
        self._writer.retire(stored)

    def _note_evicted(self, stored: StoredObject) -> None:
        mm_hash = self._hash_by_object_id.pop(stored.object_id, None)
        if mm_hash is not None:
            del self._held[mm_hash]

    def _fits(self, plan: Plan) -> bool:
        limit = min(self._max_object_bytes, self.capacity)
        if plan.size > limit and not self._has_noted_oversize:
            self._has_noted_oversize = True
            flag = "shm-cache-max-object-size-mb" if limit < self.capacity else "processor-cache-gb"
            logger.warning(
                "an item of %d bytes is larger than shared memory takes, and goes to the engine "
                "by message every time; raise `--mm-%s`",
                *(plan.size, flag),
            )
        return plan.size <= limit
