"""How much may be held at once: who finds no room waits for those that leave."""

import asyncio
from contextlib import ExitStack


class Room:
    """Of one event loop."""

    def __init__(self, size: float) -> None:
        self._left = self._size = size
        self._has_changed = asyncio.Event()
        self._turn = asyncio.Lock()

    async def take(self, amount: float) -> ExitStack:
        """Wait until so much is left, and take it until what is returned is closed.

        Of more than there ever is, take all. In the order of the calls: else small amounts would
        take what a large one waits for.
        """
        amount = min(amount, self._size)
        async with self._turn:
            while amount > self._left:
                self._has_changed.clear()
                await self._has_changed.wait()
            self._left -= amount
        hold = ExitStack()
        hold.callback(self._give, amount)
        return hold

    def _give(self, amount: float) -> None:
        self._left += amount
        self._has_changed.set()
