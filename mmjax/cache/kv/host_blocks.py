"""Which blocks of the KV cache host memory has copies of. Hashes and slots only: no arrays."""

from collections import OrderedDict
from collections.abc import Sequence

from mmjax.cache.kv.block_hash import BlockHash


class HostBlocks:
    """Gives slots of host memory to full blocks, by their hashes, the least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()
        """The least recently used first."""

    @property
    def num_used(self) -> int:
        """Slots that have a block."""
        return len(self._slots)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._slots

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the slot of a block; None: it is not there. Changes nothing."""
        return self._slots.get(block_hash)

    def touch(self, block_hashes: Sequence[BlockHash]) -> None:
        """Note that blocks are used: the first of them will be the last to go."""
        for block_hash in reversed(block_hashes):
            if block_hash in self._slots:
                self._slots.move_to_end(block_hash)

    def keep(self, block_hash: BlockHash) -> int | None:
        """Return the slot that a block is to be copied to; None: there is a copy already."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return None
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._slots[block_hash] = slot
        return slot

    def forget_all(self) -> None:
        """Drop all hashes."""
        self._free += self._slots.values()
        self._slots.clear()
