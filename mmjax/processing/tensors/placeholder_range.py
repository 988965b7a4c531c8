"""Where an item stands in a prompt, and which of its positions take embeddings."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class PlaceholderRange:
    """Where an item's placeholder stands in the prompt.

    `offset=3, length=4, is_embed=0 1 1 0`: tokens 3 to 6 belong to the item, and the item's
    embeddings replace those of tokens 4 and 5.
    """

    offset: int
    length: int
    is_embed: np.ndarray | None = None
    """bool[length]; None: every position takes an embedding."""
    _cumsum: list[int] | None = field(default=None, init=False, repr=False)

    @property
    def embeds_cumsum(self) -> list[int] | None:
        """Number of embeddings up to and including each position, or None without a mask."""
        # Counted once: the scheduler asks for windows of one range at every step.
        if self._cumsum is None and self.is_embed is not None:
            object.__setattr__(self, "_cumsum", np.cumsum(self.is_embed).tolist())
        return self._cumsum

    def get_num_embeds(self) -> int:
        """Return how many positions take an embedding."""
        return self._count_before(self.length)

    def get_embeds_indices_in_range(self, start_idx: int, end_idx: int) -> tuple[int, int]:
        """Map a half-open range of the placeholder's own positions to rows of its embeddings."""
        if self.is_embed is None:
            return start_idx, end_idx
        return self._count_before(start_idx), self._count_before(end_idx)

    def _count_before(self, position: int) -> int:
        cumsum = self.embeds_cumsum
        if cumsum is None:
            return position
        return cumsum[min(position, len(cumsum)) - 1] if position > 0 and cumsum else 0

    def extract_embeds_range(self) -> list[tuple[int, int]]:
        """Return the runs of positions that take embeddings: inclusive, in prompt coordinates."""
        if self.is_embed is None:
            return [(self.offset, self.offset + self.length - 1)]
        edges = np.diff(np.concatenate(([0], self.is_embed.astype(np.int8), [0])))
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        return [
            (self.offset + int(start), self.offset + int(end) - 1)
            for start, end in zip(starts, ends, strict=True)
        ]

    def get_longest_run(self) -> int:
        """Return the length of the longest run of positions that take embeddings."""
        runs = self.extract_embeds_range()
        return max((last + 1 - first for first, last in runs), default=0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return NotImplemented
        if (self.offset, self.length) != (other.offset, other.length):
            return False
        if self.is_embed is None or other.is_embed is None:
            return self.is_embed is other.is_embed
        is_same_dtype = self.is_embed.dtype == other.is_embed.dtype
        return is_same_dtype and np.array_equal(self.is_embed, other.is_embed)

    def __hash__(self) -> int:
        return hash((self.offset, self.length))
