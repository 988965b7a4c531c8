"""What a prompt's tokens see beside those before them, and which of them go in one step.

Knows places of embeddings alone, neither items nor steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.models.host_inputs import Sees
from mmjax.processing.tensors.inputs import PlaceholderRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Of one prompt."""

    ends: np.ndarray
    """int32[prompt]: a token's `span_end` of the attention's metadata; 0: it is causal."""
    run_ends: np.ndarray
    """int32[prompt]: the exclusive end of what goes in one step with a token, where runs are kept
    whole; 0: it may go alone."""
    first_ahead: int | None = None
    """The first token that depends on more ahead than on its own item; None: none does."""
    reference_end: int | None = None
    """Behind so many tokens, those of the prompt, a token sees these and a window of the others;
    None: the model has no such window."""

    @property
    def stop(self) -> int:
        """The exclusive end of what tokens of the prompt see."""
        return int(np.abs(self.ends).max(initial=0))

    def last_cut(self, end: int) -> int:
        """Return the last position up to `end` that is not inside a run."""
        if not 0 < end < len(self.run_ends):
            return end
        run_end = self.run_ends[end - 1]
        return end if run_end <= end else int(np.argmax(self.run_ends == run_end))

    def are_between(self, start: int, end: int) -> bool:
        """Return whether a token at the positions [start, end) may see what a causal one does not.

        A lone token sees nothing behind it; one of a prompt that sees itself sees beyond a window.
        One behind a reference sees less, which is told in the same place.
        """
        if self.reference_end is not None:
            return end > self.reference_end
        if start >= len(self.ends):
            return False
        found = self.ends[start:end]
        return bool((found < 0).any() or (end - start > 1 and found.any()))


def find_spans(
    places: Sequence[PlaceholderRange],
    num_tokens: int,
    sees: Sees,
    causal: Sequence[PlaceholderRange] = (),
) -> Spans:
    """Return the spans of a prompt of `num_tokens`, whose items have these places.

    `causal`: those of items that see nothing behind each token, whatever others see.

    Two text tokens, an image of three, text, an image of one: 0 0 5 5 5 0 7, or, where images see
    each other, 0 0 7 7 7 0 7; of a prompt that sees itself -7 -7 -7 -7 -7 -7 -7.
    """
    if sees == "prompt":
        whole = np.full(num_tokens, num_tokens, np.int32)
        return Spans(ends=-whole, run_ends=whole, first_ahead=0)
    ends = np.zeros(num_tokens, np.int32)
    if sees == "reference":
        return Spans(ends=ends, run_ends=ends, reference_end=num_tokens)
    for place in places:
        for first, last in place.extract_embeds_range():
            ends[first : last + 1] = last + 1
    run_ends = ends.copy()
    for place in causal:
        for first, last in place.extract_embeds_range():
            ends[first : last + 1] = 0
    if sees != "all_items" or not ends.any():
        return Spans(ends=ends, run_ends=run_ends)
    first, stop = int(np.flatnonzero(ends)[0]), int(ends.max())
    runs = np.zeros(num_tokens, np.int32)
    runs[first:stop] = stop
    return Spans(ends=np.where(ends > 0, runs, 0), run_ends=runs, first_ahead=first)
