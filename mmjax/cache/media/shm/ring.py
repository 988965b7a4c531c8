"""Where objects lie in a ring of bytes. Knows nothing of memory: addresses and sizes, no bytes.

Room is taken behind the newest block, from the oldest ones that may go. A block that may not go
is stepped over, and met again a round later: it holds up nobody but itself. No block crosses the
end; what is too long for the rest of the round goes to the beginning.

    newest: b                     a new e needs two places; c is being read
    | a | b | c | d | . |         behind b lie c, which stays, and d, which goes
    | a | b | c | e   e |
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar


class Block:
    """A run of bytes that one object has; the ring sets `address`."""

    __slots__ = ("address", "following", "preceding", "size")

    def __init__(self, size: int) -> None:
        self.address = -1
        self.size = size
        # Any: blocks of the ring's kind, and the end.
        self.preceding: Any = self
        self.following: Any = self

    @property
    def stop(self) -> int:
        return self.address + self.size


B = TypeVar("B", bound=Block)


class Ring(Generic[B]):
    """Blocks in the order of their addresses, and the place where the next one goes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        """What the blocks take together."""
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
        """Give a block an address, and return those that had to go; None: nothing changed."""
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
        """Return an address, the blocks in the way, and the first one behind."""
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
        """Take a block out."""
        block.preceding.following = block.following
        block.following.preceding = block.preceding
        self.num_bytes -= block.size
        if self._behind_cursor is block:
            self._behind_cursor = block.following
        if self._end.following is self._end:
            self._cursor = 0

    def shrink(self, capacity: int) -> None:
        """Place nothing behind `capacity` from now on."""
        self.capacity = min(self.capacity, capacity)
