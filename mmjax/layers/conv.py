"""Convolutions over images, with weights as checkpoints keep them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

Padding = Sequence[tuple[int, int]]
"""Zeros before and behind: of the rows, of the columns."""


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
        is_channels_last: bool = False,
        dtype: Any,
    ) -> None:
        """`is_channels_last`: images are `[I, rows, columns, C]`, else `[I, C, rows, columns]`."""
        shape = (out_channels, in_channels, kernel_size, kernel_size)
        self.weight = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros((out_channels,), dtype))
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
