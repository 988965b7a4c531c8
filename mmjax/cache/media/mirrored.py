"""The processor cache `lru`: a sender cache in P0 (sizes) mirrors a receiver cache in P1 (tensors).

The sender cache says what P1 holds, so that P0 sends only the hash of such items. Both caches see
the same requests in the same order, and make the same changes for each, in the prompt's order:

    touch every item
    resolve the items that are cached
    store the new ones  (the first of equal ones)
    evict               (the same items: sizes are equal on both sides)

If they differ (P1 was restarted, a message was lost), P1 reports the hashes that it lacks; P0
invalidates those and sends their tensors again.
"""

import threading
from collections.abc import Sequence

from mmjax.cache.lru import LRUCache
from mmjax.cache.media.processor_cache import (
    BaseMultiModalReceiverCache,
    LRUProcessorCache,
    OversizeNotice,
    SentItem,
    get_item_size,
)
from mmjax.errors import MultiModalCacheMissError
from mmjax.processing.prepared import ProcessedItem
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem


class MultiModalProcessorSenderCache(LRUProcessorCache):
    """The sender cache: hashes, sizes and prompt updates of the items that P1 holds.

    Right as long as every request that changes it reaches P1, in the order of the changes
    (`mmjax.processing.commit` makes those of one request).
    """

    def _store(self, mm_item: ProcessedItem, mm_hash: str) -> SentItem:
        self._keep(mm_hash, get_item_size(mm_item[0]), (None, mm_item[1]))
        return mm_item

    def reset_readers(self) -> None:
        self.clear_cache()


class MultiModalReceiverCache(BaseMultiModalReceiverCache):
    """The receiver cache: keeps the tensors.

    They are read-only views of the frames in which they were received: one frame is one tensor, so
    that its memory is freed with its item.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._lock = threading.Lock()
        self._cache: LRUCache[str, MultiModalKwargsItem] = LRUCache(
            capacity_bytes, getsizeof=get_item_size
        )
        self._oversize = OversizeNotice()

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
        with self._lock:
            resolved, missing = self._touch_and_resolve(keys, fresh)
            for key, item in fresh.items():
                # Replaces an older entry: P0 sends tensors only if it believes that we lack them.
                if not self._cache.put_if_fits(key, item):
                    self._oversize.give(get_item_size(item), self._cache.capacity)
        for key, feature in zip(keys, features, strict=True):
            if feature.data is None:
                feature.data = resolved.get(key)
        if missing:
            raise MultiModalCacheMissError(missing)
        return list(features)

    def clear_cache(self) -> None:
        with self._lock:
            self._cache.clear()

    def _touch_and_resolve(
        self, keys: Sequence[str], fresh: dict[str, MultiModalKwargsItem]
    ) -> tuple[dict[str, MultiModalKwargsItem], list[str]]:
        for key in keys:
            self._cache.touch(key)
        resolved, missing = dict(fresh), dict[str, None]()
        for key in keys:
            if key in fresh:
                continue
            item = self._cache.get(key)
            if item is None:
                missing[key] = None
            else:
                resolved[key] = item
        return resolved, list(missing)
