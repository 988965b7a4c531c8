"""A processor cache in shared memory: P0 writes an item once, and sends its handle to P1.

P0 alone decides what is cached. P1 may find an item evicted whose handle was on its way: it then
reports a miss, as for every other cache. An item for which there is no room is sent with its
tensors. An item is a file: P0 decides all offsets, which P1 is sent as msgpack; P1's arrays are
read-only views.
"""

import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from mmjax.cache.media.processor_cache import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    CacheEntry,
    SentItem,
)
from mmjax.cache.media.shared_directory import SharedDirectory
from mmjax.errors import ConfigError, MMJaxError, MultiModalCacheMissError
from mmjax.processing.prepared import ProcessedItem
from mmjax.processing.tensors.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    SharedItem,
)
from mmjax.processing.tensors.wire_forms import (
    DTYPES,
    WireArray,
    WireError,
    pack_item,
    unpack_item,
)
from mmjax.rounding import round_up
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

MAX_OBJECT_BYTES = 128 * 2**20


ALIGNMENT = 64
"""Alignment of arrays in bytes: the size of a cache line, and of a vector register."""


class Plan(NamedTuple):
    """Where an item's arrays will be in its file."""

    layout: bytes
    arrays: list[tuple[int, np.ndarray]]
    """(offset, C-contiguous array of a wire dtype)"""
    size: int
    """Bytes of the file."""


def lay_out_item(item: MultiModalKwargsItem) -> Plan | None:
    """Lay an item out; None if it holds dtypes or fields without a wire form, or no bytes."""
    arrays: list[tuple[int, np.ndarray]] = []
    size = 0

    def place(array: np.ndarray) -> WireArray:
        nonlocal size
        if array.dtype.name not in DTYPES:
            raise WireError(f"an array of dtype {array.dtype} has no wire form")
        offset = round_up(size, ALIGNMENT)
        # An array of ndarray's subclasses comes as a plain one; `order` keeps () as (), not (1,).
        arrays.append((offset, np.array(array, DTYPES[array.dtype.name], copy=None, order="C")))
        size = offset + array.nbytes
        return WireArray(array.dtype.name, list(array.shape), offset)

    try:
        layout = msgspec.msgpack.encode(pack_item(item, place))
    except (WireError, TypeError):  # another dtype, another field
        return None
    return Plan(layout, arrays, size) if size else None


def view_item(layout: bytes, root: np.ndarray) -> MultiModalKwargsItem:
    """Return an item whose arrays are views of `root`, uint8[size]."""

    def view(wire: WireArray) -> np.ndarray:
        dtype = DTYPES[wire.dtype]
        num_bytes = math.prod(wire.shape) * dtype.itemsize
        return root[wire.place : wire.place + num_bytes].view(dtype).reshape(wire.shape)

    return unpack_item(msgspec.msgpack.decode(layout), view)


class ShmObjectStoreSenderCache(BaseMultiModalProcessorCache):
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
        plan = lay_out_item(mm_item[0])
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


class ShmHandleError(MMJaxError, ValueError):
    """A handle that is for another item, or that does not fit the item's file."""


class ShmObjectStoreReceiverCache(BaseMultiModalReceiverCache):
    """Replaces handles by views of shared memory.

    The kernel keeps the memory until the last view is garbage collected, whatever P0 evicts.
    """

    def __init__(self, name: str, *, directory: Path | None = None) -> None:
        """Open the directory that P0 made.

        Args:
            name: `ShmObjectStoreSenderCache.name`.
            directory: As the sender's.
        """
        self._directory = SharedDirectory.open(name, directory)

    def get_and_update_features(
        self, features: Sequence[MultiModalFeatureSpec]
    ) -> list[MultiModalFeatureSpec]:
        """Replace handles by tensors; a feature that came with tensors keeps them.

        A feature without either gets those of an earlier one of the same hash. Raises
        ShmHandleError for a handle that is not of its feature's item, and MultiModalCacheMissError
        with the hashes of all evicted items; the other features are filled in by then.
        """
        found: dict[str, MultiModalKwargsItem] = {}
        missing: dict[str, None] = {}
        for feature in features:
            key = feature.mm_hash or feature.identifier
            if isinstance(feature.data, SharedItem):
                feature.data = self._read(feature.data, key)
            elif feature.data is None:
                feature.data = found.get(key)
            item = feature.tensors
            if item is None:
                missing[key] = None
            else:
                found[key] = item
        if missing:
            raise MultiModalCacheMissError(list(missing))
        return list(features)

    def clear_cache(self) -> None:
        """Do nothing: P0 decides what is cached."""

    def close(self) -> None:
        """Close the directory; existing views stay readable. Idempotent."""
        self._directory.close()

    def _read(self, handle: SharedItem, key: str) -> MultiModalKwargsItem | None:
        """Return views of an item; None if it is evicted."""
        if handle.mm_hash != key:
            raise ShmHandleError(
                f"SHM handle of item {handle.mm_hash} stands in the place of item {key}; a handle "
                "is good for its own item alone"
            )
        root = None if self._directory.is_closed else self._directory.read(handle.number)
        try:
            return None if root is None else view_item(handle.layout, root)
        except (ValueError, WireError, msgspec.MsgspecError) as error:
            raise ShmHandleError(f"SHM handle of item {key} does not fit it: {error}") from error
