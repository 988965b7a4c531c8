"""Processed items on disk, which a later server finds by their media."""

from typing import Any

import msgspec
import numpy as np

from mmjax.cache.disk_store import DiskStore, DiskStoreStats
from mmjax.cache.fingerprint import (
    describe_libraries,
    digest_class,
    digest_settings,
    fingerprint,
)
from mmjax.cache.media.shared_cache import ALIGNMENT, lay_out_item, view_item
from mmjax.config.engine_config import ModelConfig
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.tensors.inputs import MultiModalKwargsItem
from mmjax.processing.tensors.wire_forms import WireError
from mmjax.rounding import round_up

_GIB = 2**30
_SIZE_BYTES = 8
"""Of the number at the beginning: the length of the layout."""


class StoredItems:
    """Keeps items' tensors, in the form that they have in shared memory; an `ItemStore`."""

    def __init__(self, store: DiskStore) -> None:
        """`store`: of one model and its processor's settings alone."""
        self._store = store

    @property
    def stats(self) -> DiskStoreStats:
        return self._store.stats

    def load(self, key: bytes) -> MultiModalKwargsItem | None:
        """Return an item with read-only tensors; None if it is not on disk."""
        content = self._store.get(key)
        if content is None:
            return None
        try:
            end = _SIZE_BYTES + int.from_bytes(content[:_SIZE_BYTES], "little")
            arrays = np.frombuffer(content, np.uint8)[round_up(end, ALIGNMENT) :]
            item = view_item(bytes(content[_SIZE_BYTES:end]), arrays)
        except (ValueError, WireError, msgspec.MsgspecError):
            # Whole, and yet no item: whoever wrote it was no mmjax.
            return None
        item.is_from_disk = True
        return item

    def save(self, key: bytes, item: MultiModalKwargsItem) -> None:
        """Have an item written, whose tensors must not change; not one without a wire form."""
        plan = lay_out_item(item)
        if plan is None:
            return
        head = len(plan.layout).to_bytes(_SIZE_BYTES, "little") + plan.layout
        parts: list[bytes | memoryview] = [head.ljust(round_up(len(head), ALIGNMENT), b"\0")]
        end = 0
        for offset, array in plan.arrays:
            parts += [bytes(offset - end), array.reshape(-1).view(np.uint8).data]
            end = offset + array.nbytes
        self._store.put(key, parts)

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._store.close()


def open_stored_items(
    model_config: ModelConfig, processor: BaseMultiModalProcessor[Any]
) -> StoredItems | None:
    """Return the items on disk that a processor makes; None without a directory for them."""
    mm = model_config.mm
    if mm.mm_processor_cache_dir is None:
        return None
    namespace = fingerprint(
        "items",
        digest_class(type(processor)),
        digest_settings(model_config.path, *model_config.parts.values()),
        str(model_config.hf_config),
        sorted(mm.mm_processor_kwargs.items()),
        describe_libraries("transformers", "tokenizers", "pillow", "numpy"),
    )
    max_bytes = int(mm.mm_processor_cache_dir_gb * _GIB)
    return StoredItems(DiskStore(mm.mm_processor_cache_dir, max_bytes, namespace))
