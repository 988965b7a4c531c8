"""What stands in a message in the place of an item's tensors that lie in shared memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedItem:
    """A handle: names one object of shared memory, and one reading of it, for one item.

    Only P0 can sign. Whatever else claims to be a handle is refused before any of it is believed.
    """

    mm_hash: str
    """The item's, under which alone the object may be read."""
    address: int
    """Where the object begins."""
    object_id: int
    """Of the object: an address is used again, an id is not."""
    epoch: int
    """Of the reader."""
    lease_number: int
    """1 for the first handle of this object in this epoch."""
    size: int
    """Bytes of the object, its header included."""
    layout: bytes
    """msgpack: names, dtypes, shapes, offsets, fields."""
    signature: bytes = b""
    """Over all of these, with the segment's key."""
