"""Which adapter each slot of the device holds. Keys and slots, no arrays."""

from collections import OrderedDict
from collections.abc import Hashable

NO_SLOT = -1
"""The slot of a request without an adapter."""


class AdapterSlots:
    """Gives slots to adapters that requests run with; one that nobody runs with keeps its own.

    It loses it, the least recently used first, to an adapter that has none.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots: OrderedDict[Hashable, int] = OrderedDict()
        """Adapter -> its slot, the least recently used first."""
        self._num_users: dict[Hashable, int] = {}
        """Adapter -> requests that run with it; at least 1."""
        self._free = list(range(num_slots))

    def __contains__(self, key: Hashable) -> bool:
        """Whether an adapter has a slot."""
        return key in self._slots

    @property
    def num_running(self) -> int:
        """Adapters that requests run with."""
        return len(self._num_users)

    def may_start(self, key: Hashable, draining: set[Hashable]) -> bool:
        """Return whether a request may run with an adapter now; ask for requests in their order.

        One that may not, since all slots are in use, adds to `draining` the adapter whose slot it
        waits for: no later request starts with that, so that it is not in use for ever.
        """
        if key in self._slots:
            return key not in draining
        if self._free or any(one not in self._num_users for one in self._slots):
            return True
        waited_for = next((one for one in self._slots if one not in draining), None)
        if waited_for is not None:
            draining.add(waited_for)
        return False

    def acquire(self, key: Hashable) -> tuple[int, bool]:
        """Return the slot of an adapter that may start, and whether it must be loaded there."""
        is_new = key not in self._slots
        if is_new:
            self._slots[key] = self._free.pop() if self._free else self._evict()
        self._slots.move_to_end(key)
        self._num_users[key] = self._num_users.get(key, 0) + 1
        return self._slots[key], is_new

    def release(self, key: Hashable) -> None:
        """Note that a request runs no more."""
        self._num_users[key] -= 1
        if not self._num_users[key]:
            del self._num_users[key]

    def forget(self, key: Hashable) -> None:
        """Free the slot of an adapter that nobody will ask for again, and nobody runs with."""
        if key in self._slots and key not in self._num_users:
            self._free.append(self._slots.pop(key))

    def reset(self) -> None:
        """Free all slots, after their contents are lost; nobody runs."""
        assert not self._num_users, f"{self._num_users=}"
        self._free += self._slots.values()
        self._slots.clear()

    def _evict(self) -> int:
        idle = next(one for one in self._slots if one not in self._num_users)
        return self._slots.pop(idle)
