"""Convolutions over images with channels last, weights as torch keeps them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Conv2d(nnx.Module):
    """`torch.nn.Conv2d` with a bias: parameters `weight[out, in, size, size]` and `bias[out]`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int,
        padding: int,
        dtype: Any,
    ) -> None:
        shape = (out_channels, in_channels, kernel_size, kernel_size)
        self.weight = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros((out_channels,), dtype))
        self.stride = stride
        self.padding = padding

    def __call__(self, x: Float[Array, "I _y _x C"]) -> Float[Array, "I Y X D"]:
        """Convolve images, padded with zeros on every side."""
        out = jax.lax.conv_general_dilated(
            x,
            self.weight[...],
            window_strides=(self.stride, self.stride),
            padding=((self.padding, self.padding), (self.padding, self.padding)),
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
        )
        return out + self.bias[...][None, None, None, :]


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
