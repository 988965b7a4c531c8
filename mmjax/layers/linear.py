"""The linear layers, with weights `[out, in]` as in checkpoints."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.cpu.product import product
from mmjax.layers.lora import LoRA


def linear(
    x: Float[Array, "... D"],
    weight: Float[Array, "F D"],
    bias: Float[Array, " F"] | None = None,
) -> Float[Array, "... F"]:
    """Return `x @ weight.T + bias`.

    The product is always two-dimensional: XLA's CPU backend computes the gradient of a
    three-dimensional one several times more slowly.
    """
    flat = x.reshape(-1, x.shape[-1])
    if bias is None:
        out = product(flat, weight)
    else:
        # Rounded once, behind the bias, as torch does.
        out = product(flat, weight, jnp.dtype(jnp.float32)) + bias.astype(jnp.float32)[None, :]
        out = out.astype(x.dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


class Linear(nnx.Module):
    """`torch.nn.Linear`: parameters `weight[out, in]` and `bias[out]`."""

    def __init__(self, in_features: int, out_features: int, *, use_bias: bool, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None
        self.lora: LoRA | None = None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
        """Project the last axis."""
        out = linear(x, self.weight[...], None if self.bias is None else self.bias[...])
        return out if self.lora is None else out + self.lora(x)


class ClippedLinear(Linear):
    """A linear layer whose inputs and outputs are cut off at bounds that the checkpoint has."""

    def __init__(self, in_features: int, out_features: int, *, use_bias: bool, dtype: Any) -> None:
        super().__init__(in_features, out_features, use_bias=use_bias, dtype=dtype)
        bounds = [nnx.Param(jnp.zeros((), dtype)) for _ in range(4)]
        self.input_min, self.input_max, self.output_min, self.output_max = bounds

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
        """Project the last axis."""
        out = super().__call__(jnp.clip(x, self.input_min[...], self.input_max[...]))
        return jnp.clip(out, self.output_min[...], self.output_max[...])
