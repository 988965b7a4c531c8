"""Patches of images, for the towers of images of one size."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.linear import linear


class PatchEmbedding(nnx.Module):
    """A convolution with stride equal to its kernel, as one matrix product over patches."""

    def __init__(
        self, num_channels: int, dim: int, patch_size: int, *, use_bias: bool, dtype: Any
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((dim, num_channels, patch_size, patch_size), dtype))
        self.bias = nnx.Param(jnp.zeros((dim,), dtype)) if use_bias else None
        self.patch_size = patch_size

    def __call__(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Project patches, row by row; incomplete ones at the edges are dropped."""
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
