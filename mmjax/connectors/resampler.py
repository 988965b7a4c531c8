"""A resampler: learned queries read an image's features once (Qwen-VL, arXiv 2308.12966)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.layers.attention.api import dense_attention
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import resize_square

HEAD_DIM = 128
"""Width of a head; no key of the config."""
_EPS = 1e-6


class ResamplerAttention(nnx.Module):
    """The four projections of multi-head attention."""

    def __init__(self, width: int, *, dtype: Any) -> None:
        self.q_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.k_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.v_proj = Linear(width, width, use_bias=True, dtype=dtype)
        self.out_proj = Linear(width, width, use_bias=True, dtype=dtype)

    def __call__(
        self,
        query: Float[Array, "I T D"],
        key: Float[Array, "I P D"],
        value: Float[Array, "I P D"],
    ) -> Float[Array, "I T D"]:
        """Attend over `P`."""
        query, key, value = (
            project(x).reshape(*x.shape[:2], -1, HEAD_DIM)
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        out = dense_attention(query, key, value, mask=None, scale=HEAD_DIM**-0.5)
        return self.out_proj(out.reshape(*out.shape[:2], -1))


class Resampler(nnx.Module):
    """Cross-attention of a square of queries to patches of any square grid.

    Positions are those of the queries' square, resized for the patches; values have none.
    """

    def __init__(self, num_queries: int, width: int, features: int, *, dtype: Any) -> None:
        self.query = nnx.Param(jnp.zeros((num_queries, width), dtype))
        self.pos_embed = nnx.Param(jnp.zeros((num_queries, width), dtype))
        self.kv_proj = Linear(features, width, use_bias=False, dtype=dtype)
        self.ln_q = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.ln_kv = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.attn = ResamplerAttention(width, dtype=dtype)

    def __call__(self, x: Float[Array, "I P F"]) -> Float[Array, "I T D"]:
        """Return what the queries read of each image."""
        values = self.ln_kv(self.kv_proj(x))
        positions = self.pos_embed[...]
        query = self.ln_q(self.query[...]) + positions
        query = jnp.broadcast_to(query[None], (x.shape[0], *query.shape))
        side = round(x.shape[1] ** 0.5)
        return self.attn(query, values + resize_square(positions, side)[None], values)
