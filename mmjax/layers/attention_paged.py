"""Attention over blocks in plain XLA: any platform, any mask, any layout of the cache."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.attention_metadata import CrossAttentionMetadata, PagedAttentionMetadata
from mmjax.layers.embed import soft_cap as apply_soft_cap
from mmjax.layers.kv_cache import LayerCache, pad_heads

MASKED = -1e30
"""Finite, so that a row that sees nothing (padding) gives zeros and no NaN."""

State = tuple[Float[Array, "W K Z"], Float[Array, "W K Z"], Float[Array, "W K Z H"]]
"""Of an online softmax: running maximum, sum of weights, weighted values."""


def walk_sequence(
    query: Float[Array, "T N H"],
    cache: LayerCache,
    metadata: PagedAttentionMetadata,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    """Attend to the query's own sequence, whose keys and values are in `cache` already."""
    upper, lower = _visible_range(metadata, window)
    walk = partial(_walk, query, cache, metadata, metadata.block_tables, (upper, lower))
    return walk(metadata.num_blocks_bound, scale=scale, soft_cap=soft_cap)


def walk_encoder(
    query: Float[Array, "T N H"],
    cache: LayerCache,
    metadata: PagedAttentionMetadata,
    cross: CrossAttentionMetadata,
    *,
    scale: float,
) -> Float[Array, "T N H"]:
    """Attend to all of the encoder's states, whose keys and values are in `cache` already."""
    upper = jnp.broadcast_to(
        cross.lengths[metadata.tile_request][:, None], metadata.tile_rows.shape
    )
    lower = jnp.full_like(upper, -1)
    walk = partial(_walk, query, cache, metadata, cross.block_tables, (upper, lower))
    return walk(cross.num_blocks_bound, scale=scale, soft_cap=None)


def _walk(
    query: Float[Array, "T N _width"],
    cache: LayerCache,
    metadata: PagedAttentionMetadata,
    block_tables: Int[Array, "R _blocks"],
    visible: tuple[Int[Array, "W Z"], Int[Array, "W Z"]],
    bound: Int[Array, ""],
    *,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "T N _width"]:
    """Walk over blocks with an online softmax (Milakov and Gimelshein, arXiv 1805.02867).

    A block that a tile does not see leaves its state bit for bit as it was, so the answer does
    not depend on how many blocks the longest neighbour has.
    """
    tiled = _to_tiles(pad_heads(query, cache.head_dim), cache.num_kv_heads, metadata)
    group = query.shape[1] // cache.num_kv_heads
    first, bound = _blocks_to_walk(*visible, cache.block_size, bound)
    upper, lower = (jnp.tile(end, (1, group))[:, None, :, None] for end in visible)
    places = jnp.arange(cache.block_size, dtype=jnp.int32)[None, None, None, :]

    def visit(number: Array, state: State) -> State:
        block = first + number
        ids = block_tables[metadata.tile_request, block]
        scores = jnp.einsum(
            "wkqh,wkhs->wkqs", tiled, cache.read_keys(ids), preferred_element_type=jnp.float32
        )
        scores = apply_soft_cap(scores * scale, soft_cap)
        keys_at = places + (block * cache.block_size)[:, None, None, None]
        is_visible = (keys_at < upper) & (keys_at > lower)
        return _accumulate(state, scores, is_visible, cache.read_values(ids))

    shape = tiled.shape[:3]
    state = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, cache.head_dim), jnp.float32),
    )
    _, total, summed = jax.lax.fori_loop(jnp.zeros_like(bound), bound, visit, state)
    out = summed / jnp.maximum(total, 1e-30)[..., None]
    return _from_tiles(out, metadata)[..., : query.shape[-1]].astype(query.dtype)


def _blocks_to_walk(
    upper: Int[Array, "W Z"], lower: Int[Array, "W Z"], block_size: int, bound: Int[Array, ""]
) -> tuple[Int[Array, " W"], Int[Array, ""]]:
    """Return each tile's first block, and how many of them the longest walk has.

    A sliding window leaves out the blocks before it; padding rows see nothing and ask for none.
    """
    is_row = upper > 0
    earliest = jnp.where(is_row, lower + 1, jnp.iinfo(jnp.int32).max).min(1)
    first = jnp.maximum(earliest, 0) // block_size
    last = -(-upper.max(1) // block_size)
    return jnp.minimum(first, last), jnp.minimum(bound, jnp.maximum(last - first, 0).max())


def _to_tiles(
    query: Float[Array, "T N H"], num_kv_heads: int, metadata: PagedAttentionMetadata
) -> Float[Array, "W K _rows H"]:
    """Gather a tile's queries below the heads that they share, `N / K * Z` rows for each."""
    tiles, width = metadata.tile_rows.shape
    head_dim = query.shape[2]
    tiled = query.at[metadata.tile_rows].get(mode="fill", fill_value=0)
    tiled = tiled.reshape(tiles, width, num_kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    return tiled.reshape(tiles, num_kv_heads, -1, head_dim)


def _from_tiles(
    out: Float[Array, "W K _rows H"], metadata: PagedAttentionMetadata
) -> Float[Array, "T N H"]:
    """Undo `_to_tiles`."""
    tiles, width = metadata.tile_rows.shape
    num_kv_heads, head_dim = out.shape[1], out.shape[3]
    out = out.reshape(tiles, num_kv_heads, -1, width, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(tiles * width, -1, head_dim)[metadata.row_slot]


def _visible_range(
    metadata: PagedAttentionMetadata, window: int | None
) -> tuple[Int[Array, "W Z"], Int[Array, "W Z"]]:
    """Return, per query of a tile, the first index beyond and the last before what it sees."""
    end = metadata.token_index + 1
    if metadata.span_end is not None:
        end = jnp.maximum(end, metadata.span_end)
    upper = end.at[metadata.tile_rows].get(mode="fill", fill_value=0)
    if window is None:
        return upper, jnp.full_like(upper, -1)
    return upper, (metadata.token_index - window).at[metadata.tile_rows].get(
        mode="fill", fill_value=0
    )


def _accumulate(
    state: State,
    scores: Float[Array, "W K Z Q"],
    is_visible: Bool[Array, "W 1 Z Q"],
    values: Float[Array, "W K Q H"],
) -> State:
    """Fold one block of keys into the state."""
    peak, total, summed = state
    new_peak = jnp.maximum(peak, jnp.where(is_visible, scores, MASKED).max(-1))
    weights = jnp.where(is_visible, jnp.exp(scores - new_peak[..., None]), 0.0)
    decay = jnp.exp(peak - new_peak)
    block = jnp.einsum(
        "wkqs,wksh->wkqh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    return new_peak, total * decay + weights.sum(-1), summed * decay[..., None] + block
