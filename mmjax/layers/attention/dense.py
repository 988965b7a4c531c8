"""Attention over whole sequences, for towers, training and parity: cuDNN if possible, else XLA."""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.attention.backend import choose_backend
from mmjax.layers.attention.paged import MASKED, apply_soft_cap
from mmjax.layers.cpu.dispatch import Form, by_platform
from mmjax.layers.cpu.product import has_tiles
from mmjax.rounding import cdiv

CACHED_SCORES = 2**19
"""Scores that the CPU computes at a time, of one head: 2 MiB, which its caches hold."""
MANY_SCORES = 2**20
"""Scores of one sequence from which on all at once take twice the time (docs/notes/log.md)."""
PARTIAL_SCORES = 2**24
"""Scores that an accelerator computes at a time where all would take `TOO_MANY_SCORES`: 64 MiB."""
TOO_MANY_SCORES = 2**26
"""256 MiB: 8 of Gemma 3's images at once have 8 GiB of them, and other arrays as large."""


def dense_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K _value"],
    *,
    mask: Bool[Array, "B T S"] | None,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "N T S"] | None = None,
) -> Float[Array, "B T N _value"]:
    """Attend over whole sequences; the backend is chosen at lowering.

    `sinks` are as in `attention`. `bias`: what each head adds to scores, the same in all sequences.
    """
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
    xla: Form = partial(_in_xla, mask=mask, sinks=sinks, bias=bias, **options)
    if sinks is not None or bias is not None:
        return xla(query, key, value)
    num_scores = query.shape[1] * query.shape[2] * key.shape[1]
    if mask is None and num_scores >= MANY_SCORES:
        if len(query) * num_scores >= TOO_MANY_SCORES:
            xla = partial(_by_parts, **options)
        by_heads = partial(_by_heads, **options)
        xla = cast("Form", partial(jax.lax.platform_dependent, cpu=by_heads, default=xla))
    if mask is None and query.dtype == jnp.bfloat16 and has_tiles():
        xla = partial(by_platform, kernel=partial(_by_tiles, **options), cpu=xla, default=xla)
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
    sinks: Float[Array, " N"] | None,
    bias: Float[Array, "N T S"] | None,
) -> Float[Array, "B T N _value"]:
    """Attend with heads before positions.

    XLA's CPU backend runs `bnth,bnsh` at 1.5 to 2 times `btnh,bsnh`'s speed (docs/notes/log.md).
    """
    batch, length, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    group = num_heads // num_kv_heads
    rows = query.reshape(batch, length, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, num_kv_heads, group * length, head_dim)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)  # B K S H
    scores = jnp.einsum("bkth,bksh->bkts", rows, key, preferred_element_type=jnp.float32)
    scores = apply_soft_cap(scores * scale, soft_cap)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32).reshape(1, num_kv_heads, *scores.shape[2:])
    if mask is not None:
        scores = jnp.where(jnp.tile(mask, (1, group, 1))[:, None], scores, MASKED)
    if sinks is not None:
        of_rows = jnp.repeat(sinks.astype(jnp.float32), length).reshape(1, num_kv_heads, -1, 1)
        column = jnp.broadcast_to(of_rows, (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    weights = weights if sinks is None else weights[..., :-1]
    out = jnp.einsum("bkts,bksh->bkth", weights, value)
    out = out.reshape(batch, num_heads, length, -1)
    return out.transpose(0, 2, 1, 3)


def _by_heads(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K _value"],
    *,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "B T N _value"]:
    """Attend head by head, and in chunks of a head's rows: as many as give `CACHED_SCORES`."""
    batch, length, num_heads, _ = query.shape
    num_chunks = cdiv(length * key.shape[1], CACHED_SCORES)
    rows = cdiv(length, num_chunks)
    padded = jnp.pad(query, ((0, 0), (0, rows * num_chunks - length), (0, 0), (0, 0)))
    chunks = padded.transpose(0, 2, 1, 3).reshape(-1, rows, query.shape[3])
    keys, values = (
        heads.transpose(0, 2, 1, 3).reshape(-1, heads.shape[1], heads.shape[3])
        for heads in (key, value)
    )

    def attend(chunk: tuple[Float[Array, "_rows H"], Int[Array, ""]]) -> Float[Array, "_rows _v"]:
        query, head = chunk
        scores = jnp.einsum("th,sh->ts", query, keys[head], preferred_element_type=jnp.float32)
        scores = apply_soft_cap(scores * scale, soft_cap)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        seen = jnp.einsum(
            "ts,sh->th",
            weights.astype(value.dtype),
            values[head],
            preferred_element_type=jnp.float32,
        )
        return (seen / weights.sum(-1, keepdims=True)).astype(value.dtype)

    chunks_per_key_head = num_chunks * num_heads // key.shape[2]
    heads = jnp.arange(len(chunks), dtype=jnp.int32) // chunks_per_key_head
    out = jax.lax.map(attend, (chunks, heads))
    out = out.reshape(batch, num_heads, -1, value.shape[3]).transpose(0, 2, 1, 3)
    return out[:, :length]


def _by_tiles(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K _value"],
    *,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "B T N _value"]:
    """Attend in C++, by AMX: a row has the same bits beside any others."""
    out = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype)
    cap = np.float32(0 if soft_cap is None else soft_cap)
    call = jax.ffi.ffi_call("mmjax_whole_attention_bfloat16", out)
    return call(query, key, value, scale=np.float32(scale), soft_cap=cap)


def _by_parts(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K _value"],
    *,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "B T N _value"]:
    """Attend head by head, and in chunks of rows, with all sequences at once, which devices share.

    What a row sums does not depend on the chunk that it is in.
    """
    batch, length, num_heads, head_dim = query.shape
    num_chunks = cdiv(batch * length * key.shape[1], PARTIAL_SCORES)
    rows = cdiv(length, num_chunks)
    padded = jnp.pad(query, ((0, 0), (0, rows * num_chunks - length), (0, 0), (0, 0)))
    chunks = padded.reshape(batch, num_chunks, rows, num_heads, head_dim)
    chunks = chunks.transpose(3, 1, 0, 2, 4)  # N chunks B rows H
    keys, values = (
        jnp.repeat(heads.transpose(2, 0, 1, 3), num_heads // heads.shape[2], axis=0)
        for heads in (key, value)
    )  # N B S H

    def attend_head(part: tuple[Array, Array, Array]) -> Float[Array, "_chunks B _rows _value"]:
        chunks, keys, values = part
        return jax.lax.map(partial(attend, keys, values), chunks)

    def attend(keys: Array, values: Array, chunk: Array) -> Float[Array, "B _rows _value"]:
        scores = jnp.einsum("bth,bsh->bts", chunk, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(apply_soft_cap(scores * scale, soft_cap), axis=-1)
        return jnp.einsum("bts,bsh->bth", weights.astype(values.dtype), values)

    out = jax.lax.map(attend_head, (chunks, keys, values))  # N chunks B rows _value
    out = out.transpose(2, 1, 3, 0, 4).reshape(batch, -1, num_heads, value.shape[3])
    return out[:, :length]
