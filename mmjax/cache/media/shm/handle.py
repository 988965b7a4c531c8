"""Sign and verify handles of items in shared memory (HMAC-SHA256)."""

import hmac
import struct
from dataclasses import replace

from mmjax.errors import MMJaxError
from mmjax.processing.tensors.shared_item import SharedItem


class ShmHandleError(MMJaxError, ValueError):
    """A handle whose signature is invalid, or that is for another item."""


def sign_handle(handle: SharedItem, key: bytes) -> SharedItem:
    """Return the handle with its signature."""
    return replace(handle, signature=_sign(handle, key))


def check_handle(handle: SharedItem, mm_hash: str, key: bytes) -> None:
    """Raise ShmHandleError unless the signature is valid and the handle is for `mm_hash`."""
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
        # The hash's length comes first, so that hash and layout cannot be split differently.
        head = struct.pack("<6Q", *numbers, len(mm_hash))
    except struct.error as error:
        raise ShmHandleError(
            f"SHM handle signature cannot be checked: one of {numbers} is no number of 64 bits"
        ) from error
    return hmac.digest(key, head + mm_hash + handle.layout, "sha256")
