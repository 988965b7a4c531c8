"""The module of a short causal convolution, its weights as in checkpoints."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.attention.metadata import AttentionMetadata
from mmjax.layers.recurrent.convolution import short_convolution


class CausalConvolution(nnx.Module):
    """`torch.nn.Conv1d(groups=channels)`: parameters `weight[channels, 1, taps]`, `bias`."""

    def __init__(self, num_channels: int, taps: int, *, use_bias: bool, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((num_channels, 1, taps), dtype))
        self.bias = nnx.Param(jnp.zeros((num_channels,), dtype)) if use_bias else None

    def __call__(
        self,
        x: Float[Array, "T C"],
        state: Float[Array, "_slots _last C"] | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T C"], Float[Array, "_slots _last C"] | None]:
        """Convolve; as of `short_convolution`."""
        bias = None if self.bias is None else self.bias[...]
        return short_convolution(x, self.weight[...][:, 0], bias, state, metadata)
