"""Attention over whole sequences, for towers, training and parity: cuDNN if possible, else XLA."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mmjax.layers.attention.backend import choose_backend
from mmjax.layers.attention.paged import MASKED
from mmjax.layers.embed import soft_cap as apply_soft_cap


def dense_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K _value"],
    *,
    mask: Bool[Array, "B T S"] | None,
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "B T N _value"]:
    """Attend over whole sequences; the backend is chosen at lowering."""
    xla = partial(_in_xla, mask=mask, scale=scale, soft_cap=soft_cap)
    on_cuda = choose_backend(
        "cuda",
        is_paged=False,
        num_kv_heads=key.shape[2],
        head_dim=query.shape[3],
        dtype=query.dtype,
        soft_cap=soft_cap,
    )
    if on_cuda == "xla" or value.shape[3] != query.shape[3]:
        return xla(query, key, value)
    cudnn = partial(
        jax.nn.dot_product_attention,
        mask=None if mask is None else mask[:, None],
        scale=scale,
        implementation="cudnn",
    )
    return jax.lax.platform_dependent(query, key, value, cuda=cudnn, default=xla)


def _in_xla(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K _value"],
    *,
    mask: Bool[Array, "B T S"] | None,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "B T N _value"]:
    """Attend with heads before positions.

    XLA's CPU backend runs `bnth,bnsh` at 1.5 to 2 times the speed of `btnh,bsnh` (docs/log.md).
    """
    batch, length, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    group = num_heads // num_kv_heads
    rows = query.reshape(batch, length, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, num_kv_heads, group * length, head_dim)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)  # B K S H
    scores = jnp.einsum("bkth,bksh->bkts", rows, key).astype(jnp.float32)
    scores = apply_soft_cap(scores * scale, soft_cap)
    if mask is not None:
        scores = jnp.where(jnp.tile(mask, (1, group, 1))[:, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    out = jnp.einsum("bkts,bksh->bkth", weights, value)
    out = out.reshape(batch, num_heads, length, -1)
    return out.transpose(0, 2, 1, 3)
