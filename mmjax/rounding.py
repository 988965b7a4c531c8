"""Whole-number rounding, for sizes and for arrays of them."""

from typing import Any


def cdiv(numerator: Any, denominator: int) -> Any:
    """Divide, rounding up: integers, or integer arrays of numpy or jax."""
    return -(-numerator // denominator)


def round_up(number: Any, multiple: int) -> Any:
    """Return the smallest multiple that is at least `number`."""
    return cdiv(number, multiple) * multiple
