"""What stands in a message for an item in shared memory: its place, its layout, a signature.

A handle is a `MultiModalKwargsItem` of small arrays, so that it crosses the bridge like any item:

    address        uint64            where the object begins
    monotonic_id   uint64            of the object: an address is used again, an id is not
    lease          uint64[3]         epoch of the reader, number of this handle, bytes of the object
    layout         uint8[n]          msgpack: names, dtypes, shapes, offsets, fields
    signature      uint8[32]         over all of these, with the segment's key

Only P0 can sign. Whatever else claims to be a handle is refused before any of it is believed.
"""

import hmac
import struct
from typing import Any, NamedTuple

import numpy as np

from mmjax.errors import MMJaxError
from mmjax.processing.fields import MultiModalFieldElem, MultiModalSharedField
from mmjax.processing.inputs import MultiModalKwargsItem

_SHAPES = {
    "address": (np.dtype(np.uint64), ()),
    "monotonic_id": (np.dtype(np.uint64), ()),
    "lease": (np.dtype(np.uint64), (3,)),
    "layout": (np.dtype(np.uint8), (-1,)),
    "signature": (np.dtype(np.uint8), (32,)),
}


class ShmHandleError(MMJaxError, ValueError):
    """A handle that P0 did not sign."""


class Handle(NamedTuple):
    """Names one object, and one reading of it."""

    address: int
    object_id: int
    epoch: int
    lease_number: int
    """1 for the first handle of this object in this epoch."""
    size: int
    """Bytes of the object, its header included."""
    layout: bytes


def is_handle(item: MultiModalKwargsItem) -> bool:
    """Whether an item claims to be a handle."""
    return "address" in item


def sign_handle(handle: Handle, key: bytes) -> MultiModalKwargsItem:
    """Return what goes into a message."""
    lease = (handle.epoch, handle.lease_number, handle.size)
    arrays = {
        "address": np.array(handle.address, np.uint64),
        "monotonic_id": np.array(handle.object_id, np.uint64),
        "lease": np.array(lease, np.uint64),
        "layout": np.frombuffer(handle.layout, np.uint8),
        "signature": np.frombuffer(_sign(handle, key), np.uint8),
    }
    field = MultiModalSharedField(batch_size=1, keep_on_cpu=True)
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(array, field) for name, array in arrays.items()}
    )


def open_handle(item: MultiModalKwargsItem, key: bytes) -> Handle:
    """Return what a handle says; ShmHandleError where P0 did not sign just this."""
    if item.keys() != _SHAPES.keys():
        absent = ", ".join(f"`{name}`" for name in _SHAPES if name not in item) or "none"
        raise ShmHandleError(
            f"SHM handle signature cannot be checked: of a handle's fields, {absent} are missing "
            f"and {max(0, len(item) - len(_SHAPES))} are too many; only the processor cache makes "
            "handles"
        )
    arrays = {name: _field_of(item, name) for name in _SHAPES}
    epoch, lease_number, size = arrays["lease"].tolist()
    handle = Handle(
        address=int(arrays["address"]),
        object_id=int(arrays["monotonic_id"]),
        epoch=epoch,
        lease_number=lease_number,
        size=size,
        layout=arrays["layout"].tobytes(),
    )
    if not hmac.compare_digest(_sign(handle, key), arrays["signature"].tobytes()):
        raise ShmHandleError(
            f"SHM handle signature does not match object {handle.object_id} at address "
            f"{handle.address}; only the process that writes the shared memory signs handles"
        )
    return handle


def _field_of(item: MultiModalKwargsItem, name: str) -> np.ndarray:
    array: Any = item[name].data
    dtype, shape = _SHAPES[name]
    fits = isinstance(array, np.ndarray) and array.dtype == dtype
    if fits and (array.shape == shape or (shape == (-1,) and array.ndim == 1)):
        return array
    raise ShmHandleError(
        f"SHM handle signature cannot be checked: `{name}` is no array of {dtype.name} with the "
        f"shape {shape}; only the processor cache makes handles"
    )


def _sign(handle: Handle, key: bytes) -> bytes:
    *numbers, layout = handle
    return hmac.digest(key, struct.pack("<5Q", *numbers) + layout, "sha256")
