"""What stands in a message in the place of an item's tensors that lie in shared memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedItem:
    """A handle: names one item's file. Only P0 makes one: no field of a request becomes one."""

    mm_hash: str
    """The item's, under which alone the file may be read."""
    number: int
    """The file's name. A number is used once."""
    layout: bytes
    """msgpack: names, dtypes, shapes, offsets, fields."""
