"""The writer's side of objects in shared memory: allocation, handles, reference counts.

Not thread-safe: its caller holds a lock. Only `Plan.write`, between `reserve` and `publish`, needs
none.
"""

from collections.abc import Callable
from pathlib import Path

from mmjax.cache.media.shm.handle import check_handle, sign_handle
from mmjax.cache.media.shm.layout import Plan
from mmjax.cache.media.shm.ring import Block, Ring
from mmjax.cache.media.shm.segment import PAGE, Segment
from mmjax.cache.media.shm.warming import PageWarmer
from mmjax.logger import get_logger
from mmjax.processing.tensors.shared_item import SharedItem
from mmjax.rounding import round_up

logger = get_logger(__name__)


class StoredObject(Block):
    """One item's arrays in the ring."""

    __slots__ = ("is_spared", "is_written", "layout", "num_handles", "object_id", "withdrawn")

    def __init__(self, object_id: int, plan: Plan) -> None:
        super().__init__(round_up(plan.size, PAGE))
        self.object_id = object_id
        self.layout = plan.layout
        self.is_written = False
        """False while a thread copies the arrays."""
        self.is_spared = False
        """Whether others are evicted first."""
        self.num_handles = 0
        """Handles made for the current reader."""
        self.withdrawn: set[int] = set()
        """Lease numbers of handles that were not sent."""


class ObjectWriter:
    """Reserves memory, publishes objects, and makes handles."""

    def __init__(
        self,
        capacity: int,
        name: str,
        *,
        directory: Path | None,
        on_evicted: Callable[[StoredObject], None],
    ) -> None:
        self._segment = Segment.create(capacity // PAGE * PAGE, name, directory)
        self._key = self._segment.key
        self.path = self._segment.path
        self.ring: Ring[StoredObject] = Ring(self._segment.capacity)
        self._on_evicted = on_evicted
        self._num_objects = 0
        self._num_backed = 0
        """Bytes from the beginning for which pages are reserved."""
        self._has_noted_full = False
        self._warmer = PageWarmer(self._segment)
        self._warmer.stay_ahead_of(0)
        self.is_closed = False

    def reserve(self, plan: Plan) -> tuple[StoredObject, memoryview] | None:
        """Allocate an object, and return its bytes; None if all memory is in use."""
        stored = StoredObject(self._num_objects, plan)
        self._num_objects += 1
        victims = self.ring.place(stored, self._is_evictable)
        if victims is None:
            victims = self.ring.place(stored, lambda one: not self.is_in_use(one))
        for victim in victims or ():
            self._segment.erase(victim.address)
            self._on_evicted(victim)
        if victims is None or not self._back(stored):
            return None
        return stored, self._segment.data[stored.address : stored.stop]

    def publish(self, stored: StoredObject) -> None:
        """Make a written object visible to the reader."""
        self._segment.publish(stored.address, stored.object_id, stored.size)
        stored.is_written = True

    def abandon(self, stored: StoredObject) -> None:
        """Free an object that will not be published."""
        self.ring.remove(stored)

    def retire(self, stored: StoredObject) -> None:
        """Free an object now, or, if it is in use, once its handles are released."""
        if not self.is_in_use(stored):
            self._segment.erase(stored.address)
            self.ring.remove(stored)

    def make_handle(self, stored: StoredObject, mm_hash: str) -> SharedItem:
        """Return a signed handle; the object is in use until the reader releases it."""
        stored.num_handles += 1
        stored.is_spared = False
        handle = SharedItem(
            mm_hash=mm_hash,
            address=stored.address,
            object_id=stored.object_id,
            epoch=self._segment.epoch,
            lease_number=stored.num_handles,
            size=stored.size,
            layout=stored.layout,
        )
        return sign_handle(handle, self._key)

    def withdraw(self, handle: SharedItem) -> None:
        """Release a handle that will not be sent."""
        check_handle(handle, handle.mm_hash, self._key)
        if handle.epoch != self._segment.epoch:
            return
        for stored in self.ring:
            if stored.object_id == handle.object_id:
                stored.withdrawn.add(handle.lease_number)

    def reset_readers(self) -> None:
        """Release all handles, and start an epoch."""
        self._segment.start_epoch()
        for stored in self.ring:
            stored.num_handles = 0
            stored.withdrawn.clear()

    def is_in_use(self, stored: StoredObject) -> bool:
        """Whether an object is being written, or a handle of it is not released."""
        if self.is_closed or not stored.is_written:
            return not self.is_closed
        num_sent = stored.num_handles - len(stored.withdrawn)
        return self._segment.num_released(stored.address) < num_sent

    def close(self) -> None:
        """Remove the segment. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self._warmer.close()
            self._segment.close()

    def _is_evictable(self, stored: StoredObject) -> bool:
        return not stored.is_spared and not self.is_in_use(stored)

    def _back(self, stored: StoredObject) -> bool:
        """Reserve an object's pages; False, and the object is freed, if there are none."""
        if stored.stop > self._num_backed:
            try:
                self._segment.back_with_memory(self._num_backed, stored.stop - self._num_backed)
            except OSError as error:
                self._note_full(error)
                self.ring.remove(stored)
                # Smaller objects may still fit.
                self.ring.shrink(stored.stop - PAGE)
                return False
            self._num_backed = stored.stop
        self._warmer.stay_ahead_of(stored.stop)
        return True

    def _note_full(self, error: OSError) -> None:
        if not self._has_noted_full:
            self._has_noted_full = True
            logger.warning(
                "no more shared memory in `%s`: %s; the processor cache stays at about %d bytes: "
                "enlarge it, or lower `--mm-processor-cache-gb`",
                *(self.path.parent, error.strerror, self._num_backed),
            )
