"""Resizing of learned position tables, as torch's `interpolate` does it."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_CUBIC = -0.75
"""The kernel's parameter in torch, OpenCV and Pillow's older versions (Keys has -0.5)."""


def bicubic_matrix(size: int, new_size: int) -> Float[np.ndarray, "_new _old"]:
    """Return what a row of `size` values is multiplied by to have `new_size` of them.

    Half-pixel centres (`align_corners=False`), edges repeated, no antialiasing.
    """
    places = (np.arange(new_size) + 0.5) * size / new_size - 0.5
    first = np.floor(places).astype(int)
    matrix = np.zeros((new_size, size))
    for tap in range(-1, 3):
        weights = _cubic(np.abs(places - (first + tap)))
        np.add.at(matrix, (np.arange(new_size), np.clip(first + tap, 0, size - 1)), weights)
    return matrix.astype(np.float32)


def resize_square(table: Float[Array, "_old D"], side: int) -> Float[Array, "_new D"]:
    """Resize a square table of positions, row by row, to `side` rows and columns."""
    old = round(table.shape[0] ** 0.5)
    if side == old:
        return table
    matrix = jnp.asarray(bicubic_matrix(old, side))
    grid = table.astype(jnp.float32).reshape(old, old, -1)
    grid = jnp.einsum("yi,xj,ijd->yxd", matrix, matrix, grid)
    return grid.reshape(side * side, -1).astype(table.dtype)


def _cubic(distance: np.ndarray) -> np.ndarray:
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * _CUBIC - 4 * _CUBIC
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
