"""Integer rounding."""

from typing import Any


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
