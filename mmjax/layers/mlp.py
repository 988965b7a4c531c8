"""The transformation of every row by itself between two attentions."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.activation import get_activation
from mmjax.layers.linear import Linear


class MLP(nnx.Module):
    """Two linear layers and an activation."""

    def __init__(
        self, width: int, inner: int, *, activation: str, use_bias: bool = True, dtype: Any
    ) -> None:
        self.fc1 = Linear(width, inner, use_bias=use_bias, dtype=dtype)
        self.fc2 = Linear(inner, width, use_bias=use_bias, dtype=dtype)
        self.activation = get_activation(activation)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Transform the last axis."""
        return self.fc2(self.activation(self.fc1(x)))


class GatedMLP(nnx.Module):
    """Three linear layers, of which one, activated, gates another (arXiv 2002.05202)."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        out_features: int | None = None,
        activation: str,
        use_bias: bool = False,
        linear: type[Linear] = Linear,
        dtype: Any,
    ) -> None:
        """`out_features` None: as wide as what it reads. `linear`: the class of its layers."""
        self.gate_proj = linear(width, inner, use_bias=use_bias, dtype=dtype)
        self.up_proj = linear(width, inner, use_bias=use_bias, dtype=dtype)
        self.down_proj = linear(inner, out_features or width, use_bias=use_bias, dtype=dtype)
        self.activation = get_activation(activation)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... _out"]:
        """Transform the last axis."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
