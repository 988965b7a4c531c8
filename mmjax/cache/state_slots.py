"""Which states of recurrent layers each slot of the device holds. Ids and hashes only, no arrays.

A running request has a slot, in which its states change with every token, and others for the states
behind tokens that are guessed. A snapshot is a copy of a request's slot, which stays as it is: what
a prompt's first tokens leave behind, found by the hash of the last of their blocks.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from mmjax.cache.kv.block_hash import BlockHash

NO_STATE = -1
"""No slot."""


class StateSlots:
    """Gives slots to requests that run, and those that are left to snapshots.

    The snapshot that was used least recently makes room for a request, or for another snapshot.
    """

    def __init__(self, num_slots: int, slots_per_request: int = 1) -> None:
        self.num_slots = num_slots
        self._slots_per_request = slots_per_request
        self._free = list(reversed(range(num_slots)))
        self._snapshots: OrderedDict[BlockHash, int] = OrderedDict()
        """Hash of the last block -> its slot, the least recently used first."""

    @property
    def num_snapshots(self) -> int:
        """Snapshots that can be found."""
        return len(self._snapshots)

    @property
    def num_running(self) -> int:
        """Slots of requests."""
        return self.num_slots - len(self._free) - len(self._snapshots)

    def find(self, block_hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Return behind how many blocks the deepest snapshot is, and its slot.

        0 and `NO_STATE`: there is none.
        """
        for number in range(len(block_hashes), 0, -1):
            slot = self._snapshots.get(block_hashes[number - 1])
            if slot is not None:
                self._snapshots.move_to_end(block_hashes[number - 1])
                return number, slot
        return 0, NO_STATE

    def acquire(self) -> tuple[int, ...]:
        """Return the slots of a request; there are some for each that may run."""
        slots = [self._take() for _ in range(self._slots_per_request)]
        taken = tuple(slot for slot in slots if slot is not None)
        assert len(taken) == len(slots), f"all of {self.num_slots} slots are requests'"
        return taken

    def release(self, slots: Iterable[int]) -> None:
        """Take back a request's slots."""
        self._free += slots

    def keep(self, block_hash: BlockHash) -> int:
        """Return the slot to which a snapshot is to be copied.

        `NO_STATE`: there is one of that hash already, or requests have all slots.
        """
        if block_hash in self._snapshots:
            self._snapshots.move_to_end(block_hash)
            return NO_STATE
        slot = self._take()
        if slot is None:
            return NO_STATE
        self._snapshots[block_hash] = slot
        return slot

    def forget_snapshots(self) -> None:
        """Drop all snapshots; requests keep their slots."""
        self._free += self._snapshots.values()
        self._snapshots.clear()

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        return self._snapshots.popitem(last=False)[1] if self._snapshots else None
