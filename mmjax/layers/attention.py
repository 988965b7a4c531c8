"""Attention behind one function: paged for serving, dense for towers, training and parity.

A key at index j is visible to the query at index i if j < max(i + 1, span_end) and, on sliding
layers, j > i - window. `span_end` is the end of the image that the query belongs to: inside an
image attention goes both ways (HF: modeling_gemma3.py, create_masks_for_vision_model).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.embed import soft_cap as apply_soft_cap
from mmjax.layers.kv_cache import LayerCache

_MASKED = -1e30
"""Finite, so that a row that sees nothing (padding) gives zeros and no NaN."""


class PagedAttentionMetadata(NamedTuple):
    """Where a step's tokens lie; every field int32, built on the host, padded to a bucket."""

    slot_block: Int[Array, " T"]
    """Block that the token's key and value go to; padding: out of range."""
    slot_offset: Int[Array, " T"]
    token_index: Int[Array, " T"]
    """The token's place in its sequence."""
    span_end: Int[Array, " T"]
    """token_index + 1 for a causal token, else the exclusive end of its image's run."""
    tile_rows: Int[Array, "W Z"]
    """Rows of T that a tile's queries are; padding: T."""
    tile_request: Int[Array, " W"]
    """Row of `block_tables` that a tile reads."""
    row_slot: Int[Array, " T"]
    """Where in the flattened tiles a token's output lies; padding: 0."""
    block_tables: Int[Array, "R S"]
    num_blocks_bound: Int[Array, ""]
    """Blocks of the longest request: a traced bound, so that no length compiles anew."""


class DenseAttentionMetadata(NamedTuple):
    """B sequences of S tokens each, flattened to T = B * S rows."""

    token_index: Int[Array, "B S"]
    """A token's place in its sequence, for the sliding window."""
    mask: Bool[Array, "B S S"]
    """mask[b, i, j]: whether query i sees key j, before the window."""


AttentionMetadata = PagedAttentionMetadata | DenseAttentionMetadata


def attention(
    query: Float[Array, "T N H"],
    key: Float[Array, "T K H"],
    value: Float[Array, "T K H"],
    cache: LayerCache | None,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "T N H"], LayerCache | None]:
    """Attend; with paged metadata the keys and values are first written to `cache`."""
    if isinstance(metadata, PagedAttentionMetadata):
        assert cache is not None, "paged attention needs a cache"
        cache = cache.write(key, value, metadata.slot_block, metadata.slot_offset)
        out = _paged(query, cache, metadata, scale=scale, window=window, soft_cap=soft_cap)
        return out, cache
    num_sequences, length = metadata.token_index.shape
    mask = metadata.mask
    if window is not None:
        mask = mask & (metadata.token_index[:, None, :] > metadata.token_index[:, :, None] - window)
    shaped = [x.reshape(num_sequences, length, *x.shape[1:]) for x in (query, key, value)]
    out = dense_attention(*shaped, mask=mask, scale=scale, soft_cap=soft_cap)
    return out.reshape(query.shape), cache


def dense_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    mask: Bool[Array, "B T S"] | None,
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Attend over whole sequences.

    Heads are moved before positions first: XLA's CPU backend runs `bnth,bnsh` at 1.5 to 2 times
    the speed of `btnh,bsnh` (docs/log.md).
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
        scores = jnp.where(jnp.tile(mask, (1, group, 1))[:, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    out = jnp.einsum("bkts,bksh->bkth", weights, value)
    out = out.reshape(batch, num_heads, length, head_dim)
    return out.transpose(0, 2, 1, 3)


def _paged(
    query: Float[Array, "T N H"],
    cache: LayerCache,
    metadata: PagedAttentionMetadata,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    """Walk over blocks with an online softmax (Milakov and Gimelshein, arXiv 1805.02867).

    A block that a tile does not see leaves its state bit for bit as it was, so the answer does
    not depend on how many blocks the longest neighbour has.
    """
    tiles, width = metadata.tile_rows.shape
    num_kv_heads, head_dim = cache.keys.shape[1:3]
    group = query.shape[1] // num_kv_heads
    tiled = query.at[metadata.tile_rows].get(mode="fill", fill_value=0)
    tiled = tiled.reshape(tiles, width, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    tiled = tiled.reshape(tiles, num_kv_heads, group * width, head_dim)
    upper, lower = _visible_range(metadata, window)  # W Z
    upper = jnp.tile(upper, (1, group))[:, None, :, None]
    lower = jnp.tile(lower, (1, group))[:, None, :, None]
    places = jnp.arange(cache.block_size, dtype=jnp.int32)[None, None, None, :]

    def walk(block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        ids = metadata.block_tables[metadata.tile_request, block]
        scores = jnp.einsum(
            "wkqh,wkhs->wkqs", tiled, cache.keys[ids], preferred_element_type=jnp.float32
        )
        scores = apply_soft_cap(scores * scale, soft_cap)
        keys_at = places + block * cache.block_size
        is_visible = (keys_at < upper) & (keys_at > lower)
        return _accumulate(state, scores, is_visible, cache.values[ids])

    shape = (tiles, num_kv_heads, group * width)
    state = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    bound = metadata.num_blocks_bound
    _, total, summed = jax.lax.fori_loop(jnp.zeros_like(bound), bound, walk, state)
    out = summed / jnp.maximum(total, 1e-30)[..., None]
    out = out.reshape(tiles, num_kv_heads, group, width, head_dim).transpose(0, 3, 1, 2, 4)
    out = out.reshape(tiles * width, *query.shape[1:]).astype(query.dtype)
    return out[metadata.row_slot]


def _visible_range(
    metadata: PagedAttentionMetadata, window: int | None
) -> tuple[Int[Array, "W Z"], Int[Array, "W Z"]]:
    """Return, per query of a tile, the first index beyond and the last before what it sees."""
    end = jnp.maximum(metadata.token_index + 1, metadata.span_end)
    upper = end.at[metadata.tile_rows].get(mode="fill", fill_value=0)
    if window is None:
        return upper, jnp.full_like(upper, -1)
    return upper, (metadata.token_index - window).at[metadata.tile_rows].get(
        mode="fill", fill_value=0
    )


def _accumulate(
    state: tuple[Array, Array, Array],
    scores: Float[Array, "W K Z Q"],
    is_visible: Bool[Array, "W 1 Z Q"],
    values: Float[Array, "W K Q H"],
) -> tuple[Array, Array, Array]:
    """Fold one block of keys into (running maximum, sum of weights, weighted values)."""
    peak, total, summed = state
    new_peak = jnp.maximum(peak, jnp.where(is_visible, scores, _MASKED).max(-1))
    weights = jnp.where(is_visible, jnp.exp(scores - new_peak[..., None]), 0.0)
    decay = jnp.exp(peak - new_peak)
    block = jnp.einsum(
        "wkqs,wksh->wkqh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    return new_peak, total * decay + weights.sum(-1), summed * decay[..., None] + block
