"""The receiver cache of a processor cache in shared memory: reads the items that P0 wrote.

An item's arrays are read-only views of its file. The kernel keeps the memory until the last of them
is garbage collected, whatever P0 evicts meanwhile.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from mmjax.cache.media.processor_cache import BaseMultiModalReceiverCache
from mmjax.cache.media.shm.directory import SharedDirectory
from mmjax.cache.media.shm.layout import view_item
from mmjax.errors import MMJaxError, MultiModalCacheMissError
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from mmjax.processing.tensors.shared_item import SharedItem
from mmjax.processing.tensors.wire_forms import WireError


class ShmHandleError(MMJaxError, ValueError):
    """A handle that is for another item, or that does not fit the item's file."""


class ShmObjectStoreReceiverCache(BaseMultiModalReceiverCache):
    """Replaces handles by views of shared memory."""

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
            item = feature.data
            if isinstance(item, SharedItem):
                item = self._read(item, key)
            elif item is None:
                item = found.get(key)
            feature.data = item
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
