"""Convolutions over pictures, with channels first and weights as checkpoints keep them."""

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
        dtype: Any,
    ) -> None:
        shape = (out_channels, in_channels, kernel_size, kernel_size)
        self.weight = nnx.Param(jnp.zeros(shape, dtype))
        self.bias = nnx.Param(jnp.zeros((out_channels,), dtype))
        self.stride = stride
        self.padding = tuple(padding)

    def __call__(self, x: Float[Array, "I C _y _x"]) -> Float[Array, "I _out _rows _columns"]:
        """Convolve each picture."""
        out = jax.lax.conv_general_dilated(
            x,
            self.weight[...],
            window_strides=(self.stride, self.stride),
            padding=self.padding,
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )
        return out + self.bias[...][None, :, None, None]
