"""Sets of tokens as bits: token 33 is bit 1 of word 1."""

from collections.abc import Iterable

import numpy as np

from mmjax.rounding import cdiv


def pack_token_ids(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return int32[words] with the bits of `token_ids` set: 0 and 33 of 40 give 1 and 2."""
    is_allowed = np.zeros(cdiv(vocab_size, 32) * 32, bool)
    is_allowed[list(token_ids)] = True
    return np.packbits(is_allowed, bitorder="little").view("<i4")
