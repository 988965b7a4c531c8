"""Processor caches of P0 and P1: an image is processed, and sent to P1, once.

P0's satisfy the protocol `ProcessorCache` of `mmjax.processing`.
"""

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmjax.cache.lru import CacheInfo, LRUCache
from mmjax.errors import MultiModalCacheMissError
from mmjax.processing.commit import commit_items
from mmjax.processing.prepared import ProcessedItem
from mmjax.processing.prompt_updates.updates import ResolvedPromptUpdate
from mmjax.processing.tensors.fields import MultiModalFieldElem
from mmjax.processing.tensors.inputs import ItemData, MultiModalFeatureSpec
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

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


def get_item_complexity(value: Any) -> int:
    """Return the number of a value's leaves: tensors, numbers, strings."""
    if value is None:
        return 0
    if isinstance(value, MultiModalFieldElem):
        return get_item_complexity(value.data)
    if isinstance(value, Mapping):
        return sum(get_item_complexity(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(get_item_complexity(part) for part in value)
    return 1


class BaseMultiModalProcessorCache(ABC):
    """A cache of processed items in P0. Thread-safe."""

    def __init__(self) -> None:
        # Re-entrant: `get_and_update` holds it while it calls the methods of single items.
        self._lock = threading.RLock()

    @property
    @abstractmethod
    def currsize(self) -> int:
        """Bytes of the cached items' tensors."""

    @abstractmethod
    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether an item is cached; changes neither order nor statistics."""

    @abstractmethod
    def list_hashes(self) -> list[str]:
        """Return the hashes of all cached items; changes neither order nor statistics."""

    @abstractmethod
    def peek_prompt_updates(self, mm_hash: str) -> Sequence[ResolvedPromptUpdate] | None:
        """Return a cached item's prompt updates; changes neither order nor statistics."""

    @abstractmethod
    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark an item as used, if it is cached; statistics stay."""

    @abstractmethod
    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> SentItem:
        """Return the cached item; else store `mm_item`; if it is None, MultiModalCacheMissError."""

    @abstractmethod
    def invalidate(self, mm_hash: str) -> None:
        """Remove an item, if it is cached."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Remove all items; statistics stay."""

    @abstractmethod
    def reset_readers(self) -> None:
        """Adapt to a restarted P1, which holds nothing."""

    @abstractmethod
    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        """Return hits and look-ups: all, or those since the last call with `delta`."""

    def close(self) -> None:
        """Remove all items, and free resources outside of Python. Idempotent."""
        self.clear_cache()

    def is_cached(self, mm_hashes: Sequence[str]) -> list[bool]:
        """Return `is_cached_item` of each hash."""
        return [self.is_cached_item(mm_hash) for mm_hash in mm_hashes]

    def get_and_update(
        self, mm_items: Sequence[ProcessedItem | None], mm_hashes: Sequence[str]
    ) -> list[SentItem]:
        """Look up and store the items of one request, in the prompt's order, atomically.

        An item that another thread has stored meanwhile is a hit. Raises MultiModalCacheMissError,
        before any change, with all hashes that are neither cached nor given.
        """
        fresh: dict[str, ProcessedItem] = {}
        for item, mm_hash in zip(mm_items, mm_hashes, strict=True):
            if item is not None:
                fresh.setdefault(mm_hash, item)
        with self._lock:
            held = {mm_hash: self.peek_prompt_updates(mm_hash) for mm_hash in mm_hashes}
            rows = commit_items(self, mm_hashes, fresh)
        sent: list[SentItem] = []
        for row, mm_hash in zip(rows, mm_hashes, strict=True):
            updates = held[mm_hash]
            sent.append((row, fresh[mm_hash][1] if updates is None else updates))
        return sent


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


class OversizeNotice:
    """Warns once of items that are larger than their cache, which serves without them."""

    def __init__(self) -> None:
        self._is_given = False

    def give(self, num_bytes: int, capacity_bytes: int) -> None:
        if self._is_given:
            return
        self._is_given = True
        logger.warning(
            "an item of %d bytes exceeds the processor cache of %d bytes and is not "
            "cached; raise `--mm-processor-cache-gb`",
            num_bytes,
            capacity_bytes,
        )


class CacheEntry(NamedTuple):
    item_size: int
    """Bytes of the tensors. Prompt updates are small, and share contents among items."""
    hit: SentItem


class LRUProcessorCache(BaseMultiModalProcessorCache):
    """A processor cache with LRU eviction, by the bytes of the items' tensors."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__()
        self._cache: LRUCache[str, CacheEntry] = LRUCache(
            capacity_bytes, getsizeof=lambda entry: entry.item_size
        )
        self._oversize = OversizeNotice()

    @abstractmethod
    def _store(self, mm_item: ProcessedItem, mm_hash: str) -> SentItem:
        """Store a new item by `_keep`, and return what P1 is sent of it."""

    def _keep(self, mm_hash: str, item_size: int, hit: SentItem) -> None:
        """Have further look-ups return `hit`."""
        if not self._cache.put_if_fits(mm_hash, CacheEntry(item_size, hit)):
            self._oversize.give(item_size, self._cache.capacity)

    @property
    def order(self) -> tuple[str, ...]:
        """Hashes, the next to be evicted first."""
        return self._cache.order

    @property
    def currsize(self) -> int:
        """Bytes of the cached items' tensors."""
        return self._cache.currsize

    def is_cached_item(self, mm_hash: str) -> bool:
        return mm_hash in self._cache

    def list_hashes(self) -> list[str]:
        with self._lock:
            return list(self._cache.order)

    def peek_prompt_updates(self, mm_hash: str) -> Sequence[ResolvedPromptUpdate] | None:
        entry = self._cache.cache.get(mm_hash)
        return None if entry is None else entry.hit[1]

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        with self._lock:
            self._cache.touch(mm_hash)

    def get_and_update_item(self, mm_item: ProcessedItem | None, mm_hash: str) -> SentItem:
        with self._lock:
            entry = self._cache.get(mm_hash)
            if entry is not None:
                return entry.hit
            if mm_item is None:
                raise MultiModalCacheMissError([mm_hash])
            return self._store(mm_item, mm_hash)

    def invalidate(self, mm_hash: str) -> None:
        with self._lock:
            self._cache.pop(mm_hash, None)

    def clear_cache(self) -> None:
        with self._lock:
            self._cache.clear()

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        with self._lock:
            return self._cache.stat(delta=delta)


class MultiModalProcessorOnlyCache(LRUProcessorCache):
    """Keeps tensors and prompt updates in P0; P1 is sent the tensors every time."""

    def _store(self, mm_item: ProcessedItem, mm_hash: str) -> SentItem:
        self._keep(mm_hash, get_item_size(mm_item[0]), mm_item)
        return mm_item

    def reset_readers(self) -> None:
        """Do nothing: P1 is sent the tensors every time."""
