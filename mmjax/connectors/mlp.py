"""A projector of two linear layers, as most families have since LLaVA-1.5 (arXiv 2310.03744)."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.activation import get_activation
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm


class MLPProjector(nnx.Module):
    """From features to the decoder's width; parameters bear HF's names."""

    def __init__(
        self,
        in_features: int,
        width: int,
        activation: str,
        *,
        use_bias: bool = True,
        norm_eps: float | None = None,
        inner: int | None = None,
        num_joined: int = 1,
        dtype: Any,
    ) -> None:
        """`norm_eps`: of a norm before the first layer; None: there is none.

        `inner`: the width between both; None: the decoder's. `num_joined`: how many rows, one
        behind the other, are normed by themselves and joined to the `in_features` of one.
        """
        self.layer_norm = (
            None
            if norm_eps is None
            else LayerNorm(in_features // num_joined, eps=norm_eps, dtype=dtype)
        )
        self.num_joined = num_joined
        inner = width if inner is None else inner
        self.linear_1 = Linear(in_features, inner, use_bias=use_bias, dtype=dtype)
        self.linear_2 = Linear(inner, width, use_bias=use_bias, dtype=dtype)
        self.activation = get_activation(activation)

    def __call__(self, x: Float[Array, "... _in"]) -> Float[Array, "... _out"]:
        """Transform every feature by itself, or each `num_joined` rows together."""
        normed = x if self.layer_norm is None else self.layer_norm(x)
        if self.num_joined > 1:
            normed = normed.reshape(-1, self.num_joined * x.shape[-1])
        return self.linear_2(self.activation(self.linear_1(normed)))
