"""P0's half of a processor cache in shared memory: writes an item once, and sends its handle.

P0 alone decides what is held. A handle keeps its item from eviction until P1 has given it back.
Evicted is what lies there longest, and only what nobody reads. An item for which there is no room
goes to P1 by message, with its tensors.
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
    """Writes items to shared memory, and hands out handles. The only writer.

    Every handle must reach the reader, or be withdrawn: it keeps its item until then.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        max_object_bytes: int = MAX_OBJECT_BYTES,
        name: str | None = None,
        directory: Path | None = None,
    ) -> None:
        """Make the segment.

        Args:
            capacity_bytes: What the items may take together, each rounded up to pages.
            max_object_bytes: A larger item goes by message.
            name: What P1 attaches; None: a new one, to be read from `name`.
            directory: Where the file lies, for this user alone; None: in shared memory.
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

    # ---- what is held --------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Bytes that the items may take together."""
        return self._writer.ring.capacity

    @property
    def currsize(self) -> int:
        """Bytes that items take, those included that are forgotten and still being read."""
        return self._writer.ring.num_bytes

    @property
    def num_in_use(self) -> int:
        """Items that are being written or read."""
        with self._lock:
            return sum(map(self._writer.is_in_use, self._writer.ring))

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self._held

    def peek_prompt_updates(self, mm_hash: str) -> Sequence[ResolvedPromptUpdate] | None:
        held = self._held.get(mm_hash)
        return None if held is None else held.updates

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Spare a held item, where there is other room, until its handle is made.

        Its place in the ring stays: what lies there longest goes first, used or not.
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
        """Return a handle: of what is held, else of `mm_item`; itself where there is no room."""
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
        """Forget every item; what is being read stays where it is until it is given back."""
        with self._lock:
            for mm_hash in list(self._held):
                self._forget(mm_hash)

    def withdraw(self, item: ItemData) -> None:
        """Take back what was made and will not be sent; a second time changes nothing."""
        with self._lock:
            if isinstance(item, SharedItem) and not self._writer.is_closed:
                self._writer.withdraw(item)

    def reset_readers(self) -> None:
        """Void every handle, after the reader died: nothing is in use, all that is held stays.

        To be called before the next reader gets its first handle, and never while one reads.
        """
        with self._lock:
            if not self._writer.is_closed:
                self._writer.reset_readers()

    def close(self) -> None:
        """Forget every item and remove the segment; items go by message from now on."""
        with self._lock:
            self.clear_cache()
            self._writer.close()

    # ---- objects -------------------------------------------------------------------------------

    def _store(
        self, plan: Plan, updates: Sequence[ResolvedPromptUpdate], mm_hash: str
    ) -> SharedItem | None:
        """Write an item, and return its handle; None where there is no room."""
        with self._lock:
            reserved = None if self._writer.is_closed else self._writer.reserve(plan)
            if reserved is None:
                return None
        stored, buffer = reserved
        try:
            # Other threads go on meanwhile, unless this is one of a request's items: those are
            # one change, and `get_and_update` holds the lock until the last of them is written.
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
