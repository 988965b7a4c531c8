"""Which rows of the device's encoder-output pool hold which item. Row ids only, no arrays of it."""

import numpy as np


class EncoderRows:
    """Hands out pool rows by identifier; any rows do, so nothing fragments."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = np.arange(num_rows, dtype=np.int32)[::-1].copy()
        """A stack; the first `num_free` entries are free."""
        self.num_free = num_rows
        self._rows: dict[str, np.ndarray] = {}

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._rows

    def allocate(self, identifier: str, num_embeds: int) -> np.ndarray:
        """Give rows to an item, int32[num_embeds], one per embedding in order."""
        assert num_embeds <= self.num_free, f"{num_embeds=} {self.num_free=}"
        assert identifier not in self._rows, f"{identifier=} has rows already"
        self.num_free -= num_embeds
        rows = self._free[self.num_free : self.num_free + num_embeds][::-1].copy()
        self._rows[identifier] = rows
        return rows

    def get(self, identifier: str) -> np.ndarray:
        """Return an item's rows."""
        return self._rows[identifier]

    def free(self, identifier: str) -> None:
        """Take an item's rows back."""
        rows = self._rows.pop(identifier)
        self._free[self.num_free : self.num_free + len(rows)] = rows[::-1]
        self.num_free += len(rows)

    def reset(self) -> None:
        """Take all rows back."""
        for identifier in list(self._rows):
            self.free(identifier)
