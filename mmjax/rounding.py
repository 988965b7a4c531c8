"""Rounding, of integers to multiples and of matrices to 8 bits; two integers in one."""

from typing import Any

import numpy as np

MAX_INT8 = 127
MARKED_LIMIT = 1 << 13
"""Of what `mark` takes."""
LEAST_SCALE = np.finfo(np.float32).tiny
"""The scale of rows of zeros, or of numbers so small that a quotient by theirs would overflow."""


def cdiv(numerator: Any, denominator: int) -> Any:
    """Divide and round up integers, or integer arrays of numpy or jax."""
    return -(-numerator // denominator)


def round_up(number: Any, multiple: int) -> Any:
    """Round up to a multiple."""
    return cdiv(number, multiple) * multiple


def count_halvings(number: int, limit: int) -> int:
    """Return how often `number` must be halved to be at most `limit`."""
    count = 0
    while number > limit << count:
        count += 1
    return count


def mark(number: Any, group: Any = 0) -> Any:
    """Return integers, or arrays of them, as negative ones, which hold a number of a group as well.

    The integers are from 0 to `MARKED_LIMIT` - 1. So a token's position may say that the token is
    a picture's, and which picture's (`layers.rope.unmark`).
    """
    return -1 - (group * MARKED_LIMIT + number)


def quantize_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix of the host `[F, D]` as int8, and the float32 scale of each row `[F]`.

    Numbers are rounded to the nearest multiple; the largest of a row is 127 times its scale.
    """
    wide = np.asarray(weight, np.float32)
    scale = np.maximum(np.abs(wide).max(axis=1, initial=0.0) / MAX_INT8, LEAST_SCALE)
    return np.rint(wide / scale[:, None]).astype(np.int8), scale
