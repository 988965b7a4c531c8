"""The receiver cache of a processor cache in shared memory: reads the items that P0 wrote.

An item's arrays are read-only views. When the last of them is garbage collected, the object is
released, and P0 may evict it.
"""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmjax.cache.media.processor_cache import BaseMultiModalReceiverCache
from mmjax.cache.media.shm.handle import ShmHandleError, check_handle
from mmjax.cache.media.shm.layout import view_item
from mmjax.cache.media.shm.segment import Segment
from mmjax.errors import MultiModalCacheMissError
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from mmjax.processing.tensors.shared_item import SharedItem

MIN_NUM_LEASES = 1024
"""Leases that are kept before those of evicted objects are dropped."""


@dataclass(slots=True)
class _Lease:
    """The reader's counts of one object."""

    address: int
    size: int
    num_released: int = 0
    num_open: int = 0
    num_first: int = 0
    """All handles from 1 to this number have been received."""
    later: set[int] = field(default_factory=set)
    """Numbers of the handles received beyond that, out of order."""

    def take(self, lease_number: int) -> bool:
        """Record a handle; False if it was received before: it is released only once."""
        if lease_number <= self.num_first or lease_number in self.later:
            return False
        self.later.add(lease_number)
        while self.num_first + 1 in self.later:
            self.num_first += 1
            self.later.discard(self.num_first)
        self.num_open += 1
        return True


class ShmObjectStoreReceiverCache(BaseMultiModalReceiverCache):
    """Replaces handles by views of shared memory. A segment has one reader."""

    def __init__(self, name: str, *, directory: Path | None = None) -> None:
        """Attach the segment that P0 created.

        Args:
            name: `ShmObjectStoreSenderCache.name`.
            directory: As the sender's.
        """
        self._segment = Segment.attach(name, directory)
        self._key = self._segment.key
        self._epoch = self._segment.epoch
        self._leases: dict[int, _Lease] = {}
        self._max_num_leases = MIN_NUM_LEASES
        self._lock = threading.Lock()
        self._released: deque[tuple[int, int]] = deque()
        """(epoch, object id)"""
        self._is_closed = False

    def get_and_update_features(
        self, features: Sequence[MultiModalFeatureSpec]
    ) -> list[MultiModalFeatureSpec]:
        """Replace handles by tensors; a feature that came with tensors keeps them.

        A feature without either gets those of an earlier one of the same hash. Raises
        ShmHandleError for a handle with an invalid signature or for another hash, and
        MultiModalCacheMissError with the hashes of all evicted objects; the other features are
        filled in by then.
        """
        found: dict[str, MultiModalKwargsItem] = {}
        read: dict[SharedItem, MultiModalKwargsItem | None] = {}
        missing: dict[str, None] = {}
        forgery = ""
        for feature in features:
            key = feature.mm_hash or feature.identifier
            item = feature.data
            if isinstance(item, SharedItem):
                try:
                    item = self._read(item, key, read)
                except ShmHandleError as error:
                    # The other handles are read all the same, so that they are released.
                    item, forgery = None, forgery or str(error)
            elif item is None:
                item = found.get(key)
            feature.data = item
            if item is None:
                missing[key] = None
            else:
                found[key] = item
        if forgery:
            # A new one: the caught exception's traceback would keep the other items' views alive.
            raise ShmHandleError(forgery)
        if missing:
            raise MultiModalCacheMissError(list(missing))
        return list(features)

    def clear_cache(self) -> None:
        """Do nothing: P0 decides what is cached."""

    def close(self) -> None:
        """Detach; existing views stay readable. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._segment.close()

    def _read(
        self, handle: SharedItem, key: str, read: dict[SharedItem, MultiModalKwargsItem | None]
    ) -> MultiModalKwargsItem | None:
        """Return views of an object; None if it is evicted or an earlier request had the handle.

        A handle may occur several times within one request, whose results so far are `read`.
        """
        check_handle(handle, key, self._key)
        if handle not in read:
            with self._lock:
                root = self._lease(handle)
            self._publish_released()
            read[handle] = None if root is None else view_item(handle.layout, root)
        return read[handle]

    def _lease(self, handle: SharedItem) -> np.ndarray | None:
        """Return an object's bytes, uint8[size], which are released with their last view."""
        address, object_id, size = handle.address, handle.object_id, handle.size
        if self._is_closed or handle.epoch != self._segment.epoch:
            return None
        if handle.epoch != self._epoch:
            # P0 started an epoch for this reader, so it has sent it nothing before.
            self._epoch, self._leases = handle.epoch, {}
        if not self._segment.holds(address, object_id, size):
            return None
        lease = self._leases.setdefault(object_id, _Lease(address, size))
        if not lease.take(handle.lease_number):
            return None
        root = np.frombuffer(self._segment.data[address : address + size], np.uint8)
        weakref.finalize(root, self._release, self._epoch, object_id).atexit = False
        if len(self._leases) > self._max_num_leases:
            self._drop_leases()
        return root

    def _drop_leases(self) -> None:
        for object_id, lease in list(self._leases.items()):
            is_held = self._segment.holds(lease.address, object_id, lease.size)
            if not is_held and not lease.num_open:
                del self._leases[object_id]
        self._max_num_leases = max(MIN_NUM_LEASES, 2 * len(self._leases))

    def _release(self, epoch: int, object_id: int) -> None:
        # The garbage collector may call this in a thread that holds our lock: queue it, and let
        # the lock's holder do the rest.
        self._released.append((epoch, object_id))
        self._publish_released()

    def _publish_released(self) -> None:
        """Store queued releases for P0. Called after every use of the lock."""
        while self._released and self._lock.acquire(blocking=False):
            try:
                while self._released:
                    self._count_released(*self._released.popleft())
            finally:
                self._lock.release()

    def _count_released(self, epoch: int, object_id: int) -> None:
        if self._is_closed or epoch != self._epoch:
            return
        lease = self._leases[object_id]
        lease.num_open -= 1
        lease.num_released += 1
        self._segment.set_num_released(lease.address, lease.num_released, epoch)
