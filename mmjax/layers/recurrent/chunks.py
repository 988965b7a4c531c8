"""Where a prompt is cut for recurrent layers: places that depend on the prompt alone.

Sums over a chunk are added in another order than over two: with the same cuts a state has the same
bits, whatever steps the prompt was computed in.
"""

import math
from collections.abc import Sequence

import numpy as np

CHUNK = 64
"""Tokens of a chunk, at most."""


def find_chunk_ends(item_starts: Sequence[int], num_tokens: int) -> np.ndarray:
    """Return int32[chunks]: multiples of `CHUNK`, where items begin, and the prompt's end.

    An item that waits for room in the encoder cache must not keep what stands before it waiting.
    """
    inner = {*range(CHUNK, num_tokens, CHUNK), *(start for start in item_starts if start > 0)}
    return np.array(sorted({*inner, num_tokens}), np.int32)


def find_snapshot_places(
    item_ends: Sequence[int], num_tokens: int, block_size: int
) -> tuple[int, ...]:
    """Return the places behind which states are worth keeping, in order.

    The prompt's end is where its next turn begins, and the last item's where another question about
    it does. A chunk and a block end at a place. The last token is behind it: it must be computed.
    """
    step = math.lcm(CHUNK, block_size)
    ends = [num_tokens - 1, *([max(item_ends)] if item_ends else [])]
    return tuple(sorted({end // step * step for end in ends} - {0}))
