"""P1's half of a processor cache in shared memory: reads items where P0 wrote them.

An item's arrays are read-only views. When the last view of them is gone, whoever held it, the
object is given back to P0.
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

MIN_NUM_READINGS = 1024
"""So many records of objects that may be gone by now are kept before any is dropped."""


@dataclass(slots=True)
class _Reading:
    """What this reader did with one object."""

    address: int
    size: int
    num_released: int = 0
    num_open: int = 0
    num_first: int = 0
    """The handles 1 to this one came."""
    later: set[int] = field(default_factory=set)
    """Numbers of handles that came before one of a smaller number."""

    def take(self, lease_number: int) -> bool:
        """Note a handle; False where it came before: it is given back once only."""
        if lease_number <= self.num_first or lease_number in self.later:
            return False
        self.later.add(lease_number)
        while self.num_first + 1 in self.later:
            self.num_first += 1
            self.later.discard(self.num_first)
        self.num_open += 1
        return True


class ShmObjectStoreReceiverCache(BaseMultiModalReceiverCache):
    """Puts views of shared memory in the place of handles. The only reader."""

    def __init__(self, name: str, *, directory: Path | None = None) -> None:
        """Attach the segment that P0 made.

        Args:
            name: `ShmObjectStoreSenderCache.name`.
            directory: As P0 has it.
        """
        self._segment = Segment.attach(name, directory)
        self._key = self._segment.key
        self._epoch = self._segment.epoch
        self._readings: dict[int, _Reading] = {}
        self._max_num_readings = MIN_NUM_READINGS
        self._lock = threading.Lock()
        self._given_back: deque[tuple[int, int]] = deque()
        """(epoch, object id)"""
        self._is_closed = False

    def get_and_update_features(
        self, features: Sequence[MultiModalFeatureSpec]
    ) -> list[MultiModalFeatureSpec]:
        """Put tensors in the place of handles; what has tensors, keeps them.

        A feature without either has those of an earlier one with the same hash. ShmHandleError
        where P0 did not sign a handle, or signed it for
        another hash. MultiModalCacheMissError names the items whose objects are
        gone; the other features are filled in by then.
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
                    # The others are taken all the same, so that they will be given back.
                    item, forgery = None, forgery or str(error)
            elif item is None:
                item = found.get(key)
            feature.data = item
            if item is None:
                missing[key] = None
            else:
                found[key] = item
        if forgery:
            # Anew: an exception in a variable of ours would keep the others' views with it.
            raise ShmHandleError(forgery)
        if missing:
            raise MultiModalCacheMissError(list(missing))
        return list(features)

    def clear_cache(self) -> None:
        """Do nothing: P0 decides what is held."""

    def close(self) -> None:
        """Detach; views that are left stay readable. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._segment.close()

    def _read(
        self, handle: SharedItem, key: str, read: dict[SharedItem, MultiModalKwargsItem | None]
    ) -> MultiModalKwargsItem | None:
        """Return views of an object; None where it is gone, or the handle came in a request before.

        Within one request, `read`, a handle may stand several times.
        """
        check_handle(handle, key, self._key)
        if handle not in read:
            with self._lock:
                root = self._lease(handle)
            self._note_given_back()
            read[handle] = None if root is None else view_item(handle.layout, root)
        return read[handle]

    def _lease(self, handle: SharedItem) -> np.ndarray | None:
        """Return an object's bytes, to be given back when the last view of them is gone."""
        address, object_id, size = handle.address, handle.object_id, handle.size
        if self._is_closed or handle.epoch != self._segment.epoch:
            return None
        if handle.epoch != self._epoch:
            # P0 took this reader for a new one; it cannot have sent it anything before.
            self._epoch, self._readings = handle.epoch, {}
        if not self._segment.holds(address, object_id, size):
            return None
        reading = self._readings.setdefault(object_id, _Reading(address, size))
        if not reading.take(handle.lease_number):
            return None
        root = np.frombuffer(self._segment.data[address : address + size], np.uint8)
        weakref.finalize(root, self._give_back, self._epoch, object_id).atexit = False
        if len(self._readings) > self._max_num_readings:
            self._drop_readings()
        return root

    def _drop_readings(self) -> None:
        for object_id, reading in list(self._readings.items()):
            is_held = self._segment.holds(reading.address, object_id, reading.size)
            if not is_held and not reading.num_open:
                del self._readings[object_id]
        self._max_num_readings = max(MIN_NUM_READINGS, 2 * len(self._readings))

    def _give_back(self, epoch: int, object_id: int) -> None:
        # The garbage collector calls this anywhere, in a thread that has our lock too: note it,
        # and leave the rest to whoever has the lock.
        self._given_back.append((epoch, object_id))
        self._note_given_back()

    def _note_given_back(self) -> None:
        """Tell P0 what was given back. Every holder of the lock does so afterwards."""
        while self._given_back and self._lock.acquire(blocking=False):
            try:
                while self._given_back:
                    self._count_given_back(*self._given_back.popleft())
            finally:
                self._lock.release()

    def _count_given_back(self, epoch: int, object_id: int) -> None:
        if self._is_closed or epoch != self._epoch:
            return
        reading = self._readings[object_id]
        reading.num_open -= 1
        reading.num_released += 1
        self._segment.set_num_released(reading.address, reading.num_released, epoch)
