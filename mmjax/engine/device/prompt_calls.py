"""The inputs of `encode_prompts`: prompts of an encoder-decoder's encoder, padded to one length."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mmjax.engine.scheduling.buckets import split_calls
from mmjax.engine.scheduling.request import EncoderItem

PADDING_ID = -1
"""In `token_ids`: nothing stands there."""
TEXT_ROW = -1
"""In `src_rows`: a token of text, or nothing, stands there."""


class PromptCall(NamedTuple):
    """The host's arguments of one call of `encode_prompts`."""

    token_ids: np.ndarray
    """int32[B, S]"""
    src_rows: np.ndarray
    """int32[B, S]: row of the pool, of an item's embedding."""
    dst_rows: np.ndarray
    """int32[B, S]: row of the pool, of a hidden state; padding: `num_rows`, out of range."""


class PromptCalls:
    """Makes the calls that compute encoders' hidden states."""

    def __init__(self, *, max_len: int, num_rows: int) -> None:
        self._max_len = max_len
        self._num_rows = num_rows

    def fill(
        self,
        items: Sequence[EncoderItem],
        rows_of: Callable[[str], np.ndarray],
        sizes: Sequence[int],
    ) -> Iterator[PromptCall]:
        """Yield calls of the `sizes` with all items, which are hidden states, in order.

        `rows_of` returns the pool's rows of an item by its identifier: of the states, where they
        go, and of the prompts' own items, which are encoded already.
        """
        start = 0
        for size, count in split_calls(sizes, len(items)):
            call = self.empty(size)
            for row, item in enumerate(items[start : start + count]):
                self._fill_row(call, row, item, rows_of)
            yield call
            start += count

    def _fill_row(
        self,
        call: PromptCall,
        row: int,
        states: EncoderItem,
        rows_of: Callable[[str], np.ndarray],
    ) -> None:
        prompt = states.prompt
        assert prompt is not None, f"{states.identifier=} are no encoder's states"
        count = len(prompt.token_ids)
        src_rows = call.src_rows[row, :count]
        for item in prompt.items:
            mask = item.mm_position.is_embed
            chosen = slice(None) if mask is None else np.asarray(mask, bool)
            src_rows[item.start : item.end][chosen] = rows_of(item.identifier)
        # An id where an embedding stands need not be one of the vocabulary.
        call.token_ids[row, :count] = np.where(src_rows == TEXT_ROW, prompt.token_ids, 0)
        call.dst_rows[row, :count] = rows_of(states.identifier)

    def empty(self, size: int) -> PromptCall:
        """Return a call of padding."""
        shape = (size, self._max_len)
        return PromptCall(
            np.full(shape, PADDING_ID, np.int32),
            np.full(shape, TEXT_ROW, np.int32),
            np.full(shape, self._num_rows, np.int32),
        )
