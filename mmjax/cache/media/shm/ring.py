"""A ring-buffer allocator: addresses and sizes only, no memory.

A new block goes after the newest one, evicting the oldest. A block in use is skipped, and tried
again a round later. No block crosses the end: what does not fit before it goes to the beginning.

    newest: b                     e needs two units; c is in use
    | a | b | c | d | . |         behind b lie c, which stays, and d, which goes
    | a | b | c | e   e |
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar


class Block:
    """The bytes of one object; the ring sets `address`."""

    __slots__ = ("address", "following", "preceding", "size")

    def __init__(self, size: int) -> None:
        self.address = -1
        self.size = size
        # Any: a block of the ring's type, or the end.
        self.preceding: Any = self
        self.following: Any = self

    @property
    def stop(self) -> int:
        return self.address + self.size


B = TypeVar("B", bound=Block)


class Ring(Generic[B]):
    """A linked list of blocks by address, and the cursor where the next one goes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        """Sum of the blocks' sizes."""
        self._end = Block(0)
        self._end.address = capacity
        self._cursor = 0
        self._behind_cursor: Any = self._end

    def __iter__(self) -> Iterator[B]:
        block = self._end.following
        while block is not self._end:
            yield block
            block = block.following

    def place(self, block: B, is_evictable: Callable[[B], bool]) -> list[B] | None:
        """Give a block an address, and return the evicted blocks; None, without change, if full."""
        found = self._find(block.size, is_evictable)
        if found is None:
            return None
        address, victims, follower = found
        for victim in victims:
            self.remove(victim)
        block.address = address
        block.preceding, block.following = follower.preceding, follower
        follower.preceding.following = follower.preceding = block
        self.num_bytes += block.size
        self._cursor, self._behind_cursor = block.stop, follower
        return victims

    def _find(
        self, size: int, is_evictable: Callable[[B], bool]
    ) -> tuple[int, list[B], Any] | None:
        """Return an address, the blocks to evict, and the block that follows."""
        address, follower = self._cursor, self._behind_cursor
        victims: list[B] = []
        is_second_round = False
        while min(follower.address, self.capacity) - address < size:
            if follower is self._end:
                if is_second_round:
                    return None
                is_second_round, address, victims = True, 0, []
            elif is_evictable(follower):
                victims.append(follower)
            else:
                address, victims = follower.stop, []
            if is_second_round and address >= self._cursor:
                return None
            follower = follower.following
        return address, victims, follower

    def remove(self, block: B) -> None:
        """Free a block."""
        block.preceding.following = block.following
        block.following.preceding = block.preceding
        self.num_bytes -= block.size
        if self._behind_cursor is block:
            self._behind_cursor = block.following
        if self._end.following is self._end:
            self._cursor = 0

    def shrink(self, capacity: int) -> None:
        """Place nothing beyond `capacity` from now on."""
        self.capacity = min(self.capacity, capacity)
