"""Pooling by attention, of a window's mean to its patches (Molmo, arXiv 2409.17146, section 2)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from mmjax.layers.attention.api import dense_attention
from mmjax.layers.linear import Linear


class AttentionPooling(nnx.Module):
    """A window of patches becomes one row; parameters bear the published names."""

    def __init__(self, in_features: int, width: int, *, num_heads: int, dtype: Any) -> None:
        self.wq = Linear(in_features, width, use_bias=True, dtype=dtype)
        self.wk = Linear(in_features, width, use_bias=True, dtype=dtype)
        self.wv = Linear(in_features, width, use_bias=True, dtype=dtype)
        self.wo = Linear(width, width, use_bias=True, dtype=dtype)
        self.num_heads = num_heads

    def __call__(
        self, windows: Float[Array, "Z P _in"], is_patch: Bool[Array, "Z P"] | None = None
    ) -> Float[Array, "Z _width"]:
        """Return one row for each window; `is_patch` is false where a window has none."""
        if is_patch is None:
            mask, mean = None, windows.mean(axis=1, keepdims=True)
        else:
            windows = jnp.where(is_patch[:, :, None], windows, jnp.zeros((), windows.dtype))
            number = jnp.maximum(is_patch.sum(axis=1), 1).astype(windows.dtype)
            mask = is_patch[:, None]
            mean = windows.sum(axis=1, keepdims=True) / number[:, None, None]
        query, key, value = (
            project(x).reshape(*x.shape[:2], self.num_heads, -1)
            for project, x in ((self.wq, mean), (self.wk, windows), (self.wv, windows))
        )
        out = dense_attention(query, key, value, mask=mask, scale=query.shape[-1] ** -0.5)
        return self.wo(out.reshape(len(windows), -1))
