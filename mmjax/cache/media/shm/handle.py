"""Signs handles of items in shared memory, and tells P0's own from forged ones."""

import hmac
import struct
from dataclasses import replace

from mmjax.errors import MMJaxError
from mmjax.processing.tensors.shared_item import SharedItem


class ShmHandleError(MMJaxError, ValueError):
    """A handle that P0 did not sign, or not for this item."""


def sign_handle(handle: SharedItem, key: bytes) -> SharedItem:
    """Return what goes into a message."""
    return replace(handle, signature=_sign(handle, key))


def check_handle(handle: SharedItem, mm_hash: str, key: bytes) -> None:
    """Raise ShmHandleError where P0 did not sign just this, for the item `mm_hash`."""
    if not hmac.compare_digest(_sign(handle, key), handle.signature):
        raise ShmHandleError(
            f"SHM handle signature does not match object {handle.object_id} at address "
            f"{handle.address}; only the process that writes the shared memory signs handles"
        )
    if handle.mm_hash != mm_hash:
        raise ShmHandleError(
            f"SHM handle of item {handle.mm_hash} stands in the place of item {mm_hash}; a handle "
            "is good for its own item alone"
        )


def _sign(handle: SharedItem, key: bytes) -> bytes:
    mm_hash = handle.mm_hash.encode()
    numbers = (handle.address, handle.object_id, handle.epoch, handle.lease_number, handle.size)
    try:
        # The hash's length stands before it: nothing can move over to the layout.
        head = struct.pack("<6Q", *numbers, len(mm_hash))
    except struct.error as error:
        raise ShmHandleError(
            f"SHM handle signature cannot be checked: one of {numbers} is no number of 64 bits"
        ) from error
    return hmac.digest(key, head + mm_hash + handle.layout, "sha256")
