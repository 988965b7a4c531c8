"""Where processed items are kept, so that a picture is processed once.

Bookkeeping over hashes and sizes; satisfies `ProcessorCache` of the processing floor.
"""

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmjax.cache.lru import CacheInfo, LRUCache
from mmjax.config import MultiModalConfig
from mmjax.errors import MultiModalCacheMissError
from mmjax.logger import get_logger
from mmjax.processing.fields import MultiModalFieldElem
from mmjax.processing.inputs import MultiModalKwargsItem
from mmjax.processing.prompt_updates import ResolvedPromptUpdate

logger = get_logger(__name__)

CachedItem = tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]]

_GIB = 2**30


def get_item_size(value: Any) -> int:
    """Return the bytes of a value's tensors; what is not a tensor counts as Python holds it."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, MultiModalFieldElem):
        return get_item_size(value.data)
    if isinstance(value, Mapping):
        return sum(get_item_size(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(get_item_size(part) for part in value)
    return sys.getsizeof(value)


class MultiModalProcessorOnlyCache:
    """Keeps tensors and prompt updates in P0; the engine gets the tensors every time."""

    def __init__(self, capacity_bytes: int) -> None:
        # Prompt updates share their contents among items and weigh little: the tensors count.
        self._cache: LRUCache[str, CachedItem] = LRUCache(
            capacity_bytes, getsizeof=lambda cached: get_item_size(cached[0])
        )
        self._lock = threading.Lock()
        self._has_warned = False

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether an item is held; changes neither order nor statistics."""
        return mm_hash in self._cache

    def is_cached(self, mm_hashes: Sequence[str]) -> list[bool]:
        """Whether each item is held; changes neither order nor statistics."""
        return [self.is_cached_item(mm_hash) for mm_hash in mm_hashes]

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark an item as used, if it is held."""
        with self._lock:
            self._cache.touch(mm_hash)

    def get_and_update_item(self, mm_item: CachedItem | None, mm_hash: str) -> CachedItem:
        """Return the held item; else store `mm_item`; else raise MultiModalCacheMissError."""
        with self._lock:
            cached = self._cache.get(mm_hash)
            if cached is not None:
                return cached
            if mm_item is None:
                raise MultiModalCacheMissError([mm_hash])
            if self._cache.fits(mm_item):
                self._cache[mm_hash] = mm_item
            elif not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "an item of %d bytes exceeds the processor cache of %d bytes and is not "
                    "cached; raise `--mm-processor-cache-gb`",
                    get_item_size(mm_item[0]),
                    self._cache.capacity,
                )
            return mm_item

    def get_and_update(
        self, mm_items: Sequence[CachedItem | None], mm_hashes: Sequence[str]
    ) -> list[CachedItem]:
        """`get_and_update_item` for several items, in order."""
        pairs = zip(mm_items, mm_hashes, strict=True)
        return [self.get_and_update_item(item, mm_hash) for item, mm_hash in pairs]

    def invalidate(self, mm_hash: str) -> None:
        """Forget one item."""
        with self._lock:
            self._cache.pop(mm_hash, None)

    def clear_cache(self) -> None:
        """Forget every item."""
        with self._lock:
            self._cache.clear()

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        """Return hits and questions, ever or since the last call with `delta`."""
        with self._lock:
            return self._cache.stat(delta=delta)


def processor_cache_from_config(config: MultiModalConfig) -> MultiModalProcessorOnlyCache | None:
    """Return P0's cache, or None where `mm_processor_cache_gb` is 0."""
    if config.mm_processor_cache_gb <= 0:
        return None
    return MultiModalProcessorOnlyCache(int(config.mm_processor_cache_gb * _GIB))
