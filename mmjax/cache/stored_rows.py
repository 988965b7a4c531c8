"""Encoder outputs on disk, which a later engine finds by what they were computed from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from mmjax.cache.disk_store import DiskStore, DiskStoreStats


class UnsavedRows(NamedTuple):
    """What was encoded in one step, by pieces."""

    places: Mapping[bytes, np.ndarray]
    """By the key on disk, the rows of the pool that an item has, int32[rows]."""
    calls: Sequence[tuple[np.ndarray, Any]]
    """Of each call the rows that it wrote, int32[outputs], and what it wrote, [outputs, D], which
    may be on the device."""

    def read(self) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield by the keys what was written for each, `[rows, D]`, when it is."""
        written = np.concatenate([dst_rows for dst_rows, _ in self.calls])
        rows = np.concatenate([np.asarray(array) for _, array in self.calls])
        order = np.argsort(written, kind="stable")
        for key, held in self.places.items():
            yield key, rows[order[np.searchsorted(written, held, sorter=order)]]


class StoredRows:
    """Keeps each item's rows of the pool, bit for bit."""

    def __init__(self, store: DiskStore, *, width: int, dtype: np.dtype) -> None:
        """`store`: of these weights alone; the pool's rows have `width` numbers of `dtype`."""
        self._store = store
        self._width = width
        self._dtype = dtype

    @property
    def stats(self) -> DiskStoreStats:
        return self._store.stats

    def load(self, key: bytes, num_rows: int) -> np.ndarray | None:
        """Return an item's rows, `[num_rows, D]`, read-only; None if they are not on disk."""
        content = self._store.get(key)
        if content is None or len(content) != num_rows * self._width * self._dtype.itemsize:
            return None
        return np.frombuffer(content, np.uint8).view(self._dtype).reshape(num_rows, self._width)

    def save(self, key: bytes, rows: np.ndarray) -> None:
        """Have an item's rows written, `[rows, D]`, which must not change."""
        self._store.put(key, [np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data])

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._store.close()


def make_row_key(
    identifier: str, units: Mapping[str, np.ndarray], rows: np.ndarray | None
) -> bytes:
    """Return what an item's rows are known by: its identifier, and a digest of its arrays.

    Of the arrays too, since a caller's own id may stand for another content the next day.
    `rows`: which of the encoder's rows are its embeddings; None: all.
    """
    hasher = blake3()
    for name, array in [*sorted(units.items()), ("", np.array(-1) if rows is None else rows)]:
        hasher.update(repr((name, array.dtype.name, array.shape)).encode())
        hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return identifier.encode() + b"\0" + hasher.digest()
