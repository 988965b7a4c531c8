"""How much may be held at once: who finds no room waits for those that leave."""

import asyncio


class Hold:
    """A part of a room, until it is closed."""

    def __init__(self, room: "Room", amount: float) -> None:
        self._room = room
        self._amount = amount

    def close(self) -> None:
        """Give it back. Idempotent."""
        amount, self._amount = self._amount, 0.0
        self._room.give(amount)


class Room:
    """Of one event loop."""

    def __init__(self, size: float) -> None:
        self._left = self._size = size
        self._has_changed = asyncio.Event()
        self._turn = asyncio.Lock()

    async def take(self, amount: float) -> Hold:
        """Wait until so much is left, and take it; of more than there ever is, take all.

        In the order of the calls: else small amounts would take what a large one waits for.
        """
        amount = min(amount, self._size)
        async with self._turn:
            while amount > self._left:
                self._has_changed.clear()
                await self._has_changed.wait()
            self._left -= amount
        return Hold(self, amount)

    def give(self, amount: float) -> None:
        """Add what was taken, and wake those that wait."""
        self._left += amount
        self._has_changed.set()
