"""What vision towers share: patches, convolutions, positions."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.linear import linear

Padding = Sequence[tuple[int, int]]
"""Zeros before and behind: of the rows, of the columns."""

_CUBIC = -0.75
"""The parameter of the bicubic kernel in torch, OpenCV and Pillow's older versions (Keys: -0.5)."""


class PatchEmbedding(nnx.Module):
    """A convolution with stride equal to its kernel, as one matrix product over patches."""

    def __init__(
        self, num_channels: int, dim: int, patch_size: int, *, use_bias: bool, dtype: Any
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((dim, num_channels, patch_size, patch_size), dtype))
        self.bias = nnx.Param(jnp.zeros((dim,), dtype)) if use_bias else None
        self.patch_size = patch_size

    def __call__(self, pixel_values: Float[Array, "I ..."]) -> Float[Array, "I P D"]:
        """Project the patches of `[I, C, Y, X]`, row by row, or `[I, P, _pixels]` as they are cut.

        Incomplete patches at the edges are dropped.
        """
        if pixel_values.ndim == 3:
            return self.project(pixel_values)
        images, channels, height, width = pixel_values.shape
        size = self.patch_size
        rows, columns = height // size, width // size
        whole = pixel_values[:, :, : rows * size, : columns * size]
        patches = whole.reshape(images, channels, rows, size, columns, size)
        patches = patches.transpose(0, 2, 4, 1, 3, 5)  # I Y X C size size
        patches = patches.reshape(images, rows * columns, channels * size * size)
        return self.project(patches)

    def project(self, patches: Float[Array, "... _pixels"]) -> Float[Array, "... D"]:
        """Project patches that are cut already, their pixels by channel, row and column."""
        weight = self.weight[...].reshape(self.weight.shape[0], -1)
        return linear(
            patches.astype(weight.dtype), weight, None if self.bias is None else self.bias[...]
        )


class Conv2d(nnx.Module):
    """`torch.nn.Conv2d`: parameters `weight[out, in, rows, columns]` and `bias[out]`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: Padding = ((0, 0), (0, 0)),
        use_bias: bool = True,
        is_channels_last: bool = False,
        dtype: Any,
    ) -> None:
        """`is_channels_last`: images are `[I, rows, columns, C]`, else `[I, C, rows, columns]`."""
        shape = (out_channels, in_channels, kernel_size, kernel_size)
        self.weight = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros((out_channels,), dtype)) if use_bias else None
        self.stride = stride
        self.padding = tuple(padding)
        self.is_channels_last = is_channels_last

    def __call__(self, x: Float[Array, "I _ _ _"]) -> Float[Array, "I _ _ _"]:
        """Convolve each image."""
        layout = "NHWC" if self.is_channels_last else "NCHW"
        out = jax.lax.conv_general_dilated(
            x,
            self.weight[...],
            window_strides=(self.stride, self.stride),
            padding=self.padding,
            dimension_numbers=(layout, "OIHW", layout),
        )
        if self.bias is None:
            return out
        shape = (1, 1, 1, -1) if self.is_channels_last else (1, -1, 1, 1)
        return out + self.bias[...].reshape(shape)


class DepthwiseConv2d(nnx.Module):
    """A convolution of each channel by itself, of the same size out as in.

    As `torch.nn.Conv2d(groups=channels)`: parameters `weight[channels, 1, size, size]` and
    `bias[channels]`; `size` is odd.
    """

    def __init__(self, num_channels: int, kernel_size: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((num_channels, 1, kernel_size, kernel_size), dtype))
        self.bias = nnx.Param(jnp.zeros((num_channels,), dtype))

    def __call__(self, x: Float[Array, "I Y X C"]) -> Float[Array, "I Y X C"]:
        """Convolve images, padded with zeros on every side."""
        # Sums of shifted images: XLA's CPU backend has no fast program for grouped convolutions.
        weight = self.weight[...].astype(jnp.float32)
        size, (_, height, width, _) = weight.shape[-1], x.shape
        edge = size // 2
        padded = jnp.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0))).astype(jnp.float32)
        out = self.bias[...].astype(jnp.float32)[None, None, None, :]
        for row in range(size):
            for column in range(size):
                shifted = padded[:, row : row + height, column : column + width]
                out = out + shifted * weight[:, 0, row, column][None, None, None, :]
        return out.astype(x.dtype)


class PositionTable(nnx.Module):
    """One learned vector a row: parameter `weight[P, D]`."""

    def __init__(self, num_positions: int, dim: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((num_positions, dim), dtype))


def join_squares(
    states: Float[Array, "I P D"], factor: int, *, is_transposed: bool = False
) -> Float[Array, "I _tokens _width"]:
    """Join each square of `factor` by `factor` patches into one state, row by row.

    `is_transposed`: the squares stand column by column.
    """
    images, num_patches, width = states.shape
    side = round(num_patches**0.5) // factor
    squares = states.reshape(images, side, factor, side, factor, width)
    order = (0, 3, 1, 2, 4, 5) if is_transposed else (0, 1, 3, 2, 4, 5)
    return squares.transpose(order).reshape(images, side * side, factor**2 * width)


def bicubic_matrix(size: int, new_size: int) -> Float[np.ndarray, "_new _old"]:
    """Return what a row of `size` values is multiplied by to have `new_size` of them.

    As torch's `interpolate`: half-pixel centres (`align_corners=False`), edges repeated, no
    antialiasing.
    """
    places = (np.arange(new_size) + 0.5) * size / new_size - 0.5
    first = np.floor(places).astype(int)
    matrix = np.zeros((new_size, size))
    for tap in range(-1, 3):
        weights = _cubic(np.abs(places - (first + tap)))
        np.add.at(matrix, (np.arange(new_size), np.clip(first + tap, 0, size - 1)), weights)
    return matrix.astype(np.float32)


def antialiased_matrix(size: int, new_size: int) -> Float[np.ndarray, "_new _old"]:
    """Return the same as torch's `interpolate` does with `antialias`, whose kernel is Pillow's.

    The kernel is as much wider as values become fewer, and its weights sum to 1 at the edges too.
    """
    scale = size / new_size
    width = max(scale, 1.0)
    centers = (np.arange(new_size) + 0.5) * scale
    distance = np.abs(np.arange(size)[None, :] + 0.5 - centers[:, None]) / width
    weights = _cubic(distance, -0.5)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def linear_matrix(size: int, new_size: int) -> Float[np.ndarray, "_new _old"]:
    """Return the same for a linear kernel: half-pixel centres, edges repeated, no antialiasing."""
    places = np.clip((np.arange(new_size) + 0.5) * size / new_size - 0.5, 0, size - 1)
    distance = np.abs(np.arange(size)[None, :] - places[:, None])
    return np.maximum(1 - distance, 0).astype(np.float32)


def resize_square(
    table: Float[Array, "_old D"],
    side: int,
    *,
    make_matrix: Callable[[int, int], Float[np.ndarray, "_new _old"]] = bicubic_matrix,
) -> Float[Array, "_new D"]:
    """Resize a square table of positions, row by row, to `side` rows and columns.

    `make_matrix`: `bicubic_matrix` or another of its kind.
    """
    old = round(table.shape[0] ** 0.5)
    if side == old:
        return table
    matrix = jnp.asarray(make_matrix(old, side))
    grid = table.astype(jnp.float32).reshape(old, old, -1)
    grid = jnp.einsum("yi,xj,ijd->yxd", matrix, matrix, grid)
    return grid.reshape(side * side, -1).astype(table.dtype)


def _cubic(distance: np.ndarray, a: float = _CUBIC) -> np.ndarray:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
