"""Processor caches of P0 and P1: an image is processed, and sent to P1, once.

P0's satisfy the protocol `ProcessorCache` of `mmjax.processing`. Of the type `lru`, a sender cache
in P0 (sizes) mirrors a receiver cache in P1 (tensors): it says what P1 holds, so that P0 sends only
the hash of such items. Both caches see the same requests in the same order, and make the same
changes for each, in the prompt's order:

    touch every item
    resolve the items that are cached
    store the new ones  (the first of equal ones)
    evict               (the same items: sizes are equal on both sides)

If they differ (P1 was restarted, a message was lost), P1 reports the hashes that it lacks; P0
invalidates those and sends their tensors again.
"""

import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mmjax.cache.media.lru import CacheInfo, LRUCache
from mmjax.errors import MultiModalCacheMissError
from mmjax.processing.prepared import ProcessedItem
from mmjax.processing.prompt_updates.updates import ResolvedPromptUpdate
from mmjax.processing.tensors.fields import MultiModalFieldElem
from mmjax.processing.tensors.inputs import ItemData, MultiModalFeatureSpec, MultiModalKwargsItem
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

V = TypeVar("V")

SentItem = tuple[ItemData | None, Sequence[ResolvedPromptUpdate]]
"""What is sent to P1 (None: P1 has the tensors), and the prompt updates."""


def get_item_size(value: Any) -> int:
    """Return the bytes of a value's tensors.

    Equal in P0 and P1, before and after the transport: a number counts as the array that it is
    sent as. Other objects, which cannot be sent, count by `sys.getsizeof`.
    """
    if value is None:
        return 0
    if isinstance(value, MultiModalFieldElem):
        return get_item_size(value.data)
    if isinstance(value, Mapping):
        return sum(get_item_size(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(get_item_size(part) for part in value)
    if isinstance(value, bool | int | float | complex):
        return np.asarray(value).nbytes
    nbytes = getattr(value, "nbytes", None)
    return int(nbytes) if nbytes is not None else sys.getsizeof(value)


class _ItemLRU(LRUCache[str, V]):
    """Warns once of items that are larger than itself, and serves without them."""

    def __init__(self, capacity: int, getsizeof: Callable[[V], int]) -> None:
        super().__init__(capacity, getsizeof)
        self._has_warned = False

    def put_if_fits(self, key: str, value: V) -> bool:
        is_kept = super().put_if_fits(key, value)
        if not is_kept and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "an item of %d bytes exceeds the processor cache of %d bytes and is not "
                "cached; raise `--mm-processor-cache-gb`",
                self._getsizeof(value),
                self.capacity,
            )
        return is_kept


class CacheEntry(NamedTuple):
    item_size: int
    """Bytes of the tensors. Prompt updates are small, and share contents among items."""
    hit: SentItem


class BaseMultiModalProcessorCache(ABC):
    """A cache of processed items in P0: evicts by the bytes of their tensors. Thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        # Re-entrant: `get_and_update` holds it while it calls the methods of single items.
        self._lock = threading.RLock()
        self._cache: LRUCache[str, CacheEntry] = _ItemLRU(
            capacity_bytes, getsizeof=lambda entry: entry.item_size
        )

    @abstractmethod
    def _store(self, mm_item: ProcessedItem, mm_hash: str) -> SentItem:
        """Store a new item by `_keep`, and return what P1 is sent of it."""

    @abstractmethod
    def reset_readers(self) -> None:
        """Adapt to a restarted P1, which holds nothing."""

    def _keep(self, mm_hash: str, item_size: int, hit: SentItem) -> None:
        """Have further look-ups return `hit`."""
        self._cache.put_if_fits(mm_hash, CacheEntry(item_size, hit))

    @property
    def order(self) -> tuple[str, ...]:
        """Hashes, the next to be evicted first."""
        return self._cache.order

    @property
    def currsize(self) -> int:
        """Bytes of the cached items' tensors."""
        return self._cache.currsize

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether an item is cached; changes neither order nor statistics."""
        return mm_hash in self._cache

    def is_cached(self, mm_hashes: Sequence[str]) -> list[bool]:
        """Return `is_cached_item` of each hash."""
        return [self.is_cached_item(mm_hash) for mm_hash in mm_hashes]

    def list_hashes(self) -> list[str]:
        """Return the hashes of all cached items; changes neither order nor statistics."""
        with self._lock:
            return list(self._cache.order)

    def peek_prompt_updates(self, mm_hash: str) -> Sequence[ResolvedPromptUpdate] | None:
        """Return a cached item's prompt updates; changes neither order nor statistics."""
        entry = self._cache.cache.get(mm_hash)
        return None if entry is None else entry.hit[1]

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark an item as used, if it is cached; statistics stay."""
        with self._lock:
            self._cache.touch(mm_hash)

    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> SentItem:
        """Return the cached item; else store `mm_item`; if it is None, MultiModalCacheMissError."""
        with self._lock:
            entry = self._cache.get(mm_hash)
            if entry is not None:
                return entry.hit
            if mm_item is None:
                raise MultiModalCacheMissError([mm_hash])
            return self._store(mm_item, mm_hash)

    def get_and_update(
        self, mm_items: Sequence[ProcessedItem | None], mm_hashes: Sequence[str]
    ) -> list[SentItem]:
        """Look up and store the items of one request, in the prompt's order, atomically.

        An item that another thread has stored meanwhile is a hit. Raises MultiModalCacheMissError,
        before any change, with all hashes that are neither cached nor given. P1's cache does the
        same to the same features, so that both evict alike.
        """
        fresh: dict[str, ProcessedItem] = {}
        for item, mm_hash in zip(mm_items, mm_hashes, strict=True):
            if item is not None:
                fresh.setdefault(mm_hash, item)
        counts = Counter(mm_hashes)
        with self._lock:
            held = {mm_hash for mm_hash in counts if self.is_cached_item(mm_hash)}
            missing = [h for h in counts if h not in held and h not in fresh]
            if missing:
                raise MultiModalCacheMissError(missing)
            # First every touch: storing a fresh item must not evict one that is needed here.
            for mm_hash in mm_hashes:
                self.touch_sender_cache_item(mm_hash)
            rows = {
                row: self.get_and_update_item(fresh.get(mm_hash), mm_hash)
                for row, mm_hash in enumerate(mm_hashes)
                if mm_hash in held
            }
            repeats: dict[str, SentItem] = {}
            for row, mm_hash in enumerate(mm_hashes):
                if mm_hash in held:
                    continue
                if mm_hash in repeats:
                    rows[row] = repeats[mm_hash]
                    continue
                rows[row] = repeats[mm_hash] = self.get_and_update_item(fresh[mm_hash], mm_hash)
                if counts[mm_hash] > 1 and self.is_cached_item(mm_hash):
                    # The newest already, so that this changes no order.
                    repeats[mm_hash] = self.get_and_update_item(None, mm_hash)
        return [rows[row] for row in range(len(mm_hashes))]

    def invalidate(self, mm_hash: str) -> None:
        """Remove an item, if it is cached."""
        with self._lock:
            self._cache.pop(mm_hash, None)

    def clear_cache(self) -> None:
        """Remove all items; statistics stay."""
        with self._lock:
            self._cache.clear()

    def close(self) -> None:
        """Remove all items, and free resources outside of Python. Idempotent."""
        self.clear_cache()

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        """Return hits and look-ups: all, or those since the last call with `delta`."""
        with self._lock:
            return self._cache.stat(delta=delta)


class MultiModalProcessorOnlyCache(BaseMultiModalProcessorCache):
    """Keeps tensors and prompt updates in P0; P1 is sent the tensors every time."""

    def _store(self, mm_item: ProcessedItem, mm_hash: str) -> SentItem:
        self._keep(mm_hash, get_item_size(mm_item[0]), mm_item)
        return mm_item

    def reset_readers(self) -> None:
        """Do nothing: P1 is sent the tensors every time."""


class MultiModalProcessorSenderCache(BaseMultiModalProcessorCache):
    """The sender cache: hashes, sizes and prompt updates of the items that P1 holds.

    Right as long as every request that changes it reaches P1, in the order of the changes.
    """

    def _store(self, mm_item: ProcessedItem, mm_hash: str) -> SentItem:
        self._keep(mm_hash, get_item_size(mm_item[0]), (None, mm_item[1]))
        return mm_item

    def reset_readers(self) -> None:
        self.clear_cache()


class BaseMultiModalReceiverCache(ABC):
    """A receiver cache: P1's side of a cache whose sender is in P0."""

    @property
    def currsize(self) -> int:
        """Bytes of the cached items' tensors in this process's own memory."""
        return 0

    @abstractmethod
    def get_and_update_features(
        self, features: Sequence[MultiModalFeatureSpec]
    ) -> list[MultiModalFeatureSpec]:
        """Fill in the tensors of one request's features, which are in the prompt's order.

        Stores the items that came with data. Then raises MultiModalCacheMissError with all hashes
        whose tensors are missing; the other features are filled in by then.
        """

    @abstractmethod
    def clear_cache(self) -> None:
        """Remove all items."""

    def close(self) -> None:
        """Remove all items, and free resources outside of Python. Idempotent."""
        self.clear_cache()


class MultiModalReceiverCache(BaseMultiModalReceiverCache):
    """The receiver cache: keeps the tensors.

    They are read-only views of the frames in which they were received: one frame is one tensor, so
    that its memory is freed with its item.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._lock = threading.Lock()
        self._cache: LRUCache[str, MultiModalKwargsItem] = _ItemLRU(capacity_bytes, get_item_size)

    @property
    def order(self) -> tuple[str, ...]:
        """Hashes, the next to be evicted first."""
        return self._cache.order

    @property
    def currsize(self) -> int:
        """Bytes of the cached tensors."""
        return self._cache.currsize

    def get_and_update_features(
        self, features: Sequence[MultiModalFeatureSpec]
    ) -> list[MultiModalFeatureSpec]:
        keys = [feature.mm_hash or feature.identifier for feature in features]
        fresh: dict[str, MultiModalKwargsItem] = {}
        for key, feature in zip(keys, features, strict=True):
            if (item := feature.tensors) is not None:
                fresh.setdefault(key, item)
        resolved: dict[str, MultiModalKwargsItem | None] = {**fresh}
        with self._lock:
            for key in keys:
                self._cache.touch(key)
            for key in keys:
                if key not in fresh:
                    resolved[key] = self._cache.get(key)
            for key, item in fresh.items():
                # Replaces an older entry: P0 sends tensors only if it believes that we lack them.
                self._cache.put_if_fits(key, item)
        for key, feature in zip(keys, features, strict=True):
            if feature.data is None:
                feature.data = resolved[key]
        missing = [key for key, item in resolved.items() if item is None]
        if missing:
            raise MultiModalCacheMissError(missing)
        return list(features)

    def clear_cache(self) -> None:
        with self._lock:
            self._cache.clear()
