"""The attention interface: paged for serving, dense for towers, training and parity.

Callers depend neither on the platform nor on the KV cache's layout; `backend` chooses both.
"""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.attention.backend import Backend, choose_backend
from mmjax.layers.attention.dense import dense_attention
from mmjax.layers.attention.gpu import gpu_attention
from mmjax.layers.attention.kv_cache import (
    DenseCache,
    InterleavedCache,
    KVCacheSpec,
    LayerCache,
    RowCache,
    SlotCache,
    TransposedCache,
)
from mmjax.layers.attention.metadata import (
    AttentionMetadata,
    ChunkWindow,
    CrossAttentionMetadata,
    DenseAttentionMetadata,
    DenseCrossMetadata,
    PagedAttentionMetadata,
    Window,
    find_unseen,
)
from mmjax.layers.attention.paged import visible_range, visible_states, walk_blocks
from mmjax.layers.attention.tpu import ragged_attention, ragged_takes

__all__ = [
    "AttentionMetadata",
    "CrossAttentionMetadata",
    "DenseAttentionMetadata",
    "DenseCrossMetadata",
    "PagedAttentionMetadata",
    "attention",
    "choose_cache_type",
    "cross_attention",
    "dense_attention",
    "find_attending",
    "span_variants",
    "with_gaps",
    "without_spans",
    "write_encoder",
]


CacheT = TypeVar("CacheT", bound=LayerCache | DenseCache | None)
"""What a layer is given is what it returns."""


def choose_cache_type(
    platform: str, spec: KVCacheSpec, dtype: Any, *, num_shards: int = 1
) -> type[LayerCache]:
    """Return the KV cache's layout for the attention backend of a platform.

    `num_shards`: devices that the key-value heads are sharded over.
    """
    backends: set[Backend] = {
        choose_backend(
            platform,
            is_paged=True,
            num_kv_heads=layer.num_kv_heads // num_shards,
            head_dim=layer.head_dim,
            dtype=dtype,
        )
        for layer in spec.layers
    }
    if backends == {"ragged"}:
        return InterleavedCache
    if platform == "tpu":
        return RowCache
    return SlotCache if backends == {"triton"} else TransposedCache


def span_variants(cache_type: type[LayerCache], *, has_spans: bool) -> tuple[bool, ...]:
    """Return the values of `StepBucket.has_spans` for a model with bidirectional spans or not.

    Both if a kernel computes causal steps only; else one, so that few programs are compiled.
    """
    if not has_spans:
        return (False,)
    return (False, True) if cache_type is InterleavedCache else (True,)


def attention(
    query: Float[Array, "T N H"],
    key: Float[Array, "T K H"] | None,
    value: Float[Array, "T K _value"] | None,
    cache: CacheT,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: Window = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    distance_bias: Float[Array, "N _distances"] | None = None,
    keeps_reference: bool = False,
) -> tuple[Float[Array, "T N _value"], CacheT]:
    """Return attention outputs and the cache, to which paged attention writes first.

    `key` and `value` None: the cache has them already, of an earlier layer that shares it.
    `window`: which of the tokens before it a token sees. `sinks`: the score of one more key of each
    head, which every query sees and which has no value (arXiv 2309.17453, section 3.3).
    `distance_bias`: what each head adds to the score of a key so many tokens before the query, the
    last to all that are farther; of causal attention without sinks, whose heads share no keys.
    `keeps_reference`: the window, which slides, hides no key before `span_end` (R-SWA, arXiv
    2606.23050); without that, it hides none, and a dense mask says so by itself.
    """
    window = _resolve(window, cache, metadata)
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap}
    cache = _store(key, value, cache, metadata)
    assert distance_bias is None or sinks is None, "no served model has both"
    if isinstance(metadata, DenseAttentionMetadata):
        held: Any = DenseCache(key, value) if cache is None else cache
        options |= {"sinks": sinks, "distance_bias": distance_bias}
        return _dense(query, held.keys, held.values, metadata, **options), cache
    if keeps_reference and metadata.span_end is not None:
        assert sinks is None, "no served model has both"
        return _beside_reference(query, cache, metadata, **options), cache
    if keeps_reference:
        options["window"] = None
    if distance_bias is not None:
        return _with_bias(query, cache, metadata, distance_bias, **options), cache
    paged = partial(_paged, sinks=sinks, **options)
    # JAX's kernel for TPUs has no sinks, and no chunks.
    is_foreign = sinks is not None or isinstance(window, ChunkWindow)
    if is_foreign or not isinstance(cache, InterleavedCache):
        return paged(query, cache, metadata), cache
    if not ragged_takes(query, cache, metadata):
        return paged(query, cache, metadata), cache
    kernel = partial(ragged_attention, **options)
    return jax.lax.platform_dependent(query, cache, metadata, tpu=kernel, default=paged), cache


def _resolve(window: Window, cache: Any, metadata: AttentionMetadata) -> Window:
    """Return no window where no sequence of an engine is longer than the first chunk."""
    if not isinstance(window, ChunkWindow) or isinstance(metadata, DenseAttentionMetadata):
        return window
    longest = metadata.block_tables.shape[1] * cache.block_size
    return None if longest <= window.size else window


def _with_bias(
    query: Float[Array, "T N H"],
    cache: Any,
    metadata: PagedAttentionMetadata,
    distance_bias: Float[Array, "N _distances"],
    *,
    scale: float,
    window: Window,
    soft_cap: float | None,
) -> Float[Array, "T N _value"]:
    """Attend in XLA on every platform: the kernels have no term of the distance."""
    assert cache.num_kv_heads == query.shape[1], f"{cache.num_kv_heads=} {query.shape=}"
    causal = metadata._replace(span_end=None)
    return walk_blocks(
        query,
        cache,
        causal,
        causal.block_tables,
        visible_range(causal, window),
        scale=scale,
        soft_cap=soft_cap,
        distance_bias=distance_bias,
    )


def _beside_reference(
    query: Float[Array, "T N H"],
    cache: Any,
    metadata: PagedAttentionMetadata,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N _value"]:
    """Attend in XLA on every platform: the kernels see one range of keys, and here are two."""
    causal = metadata._replace(span_end=None)
    return walk_blocks(
        query,
        cache,
        causal,
        causal.block_tables,
        visible_range(causal, window),
        scale=scale,
        soft_cap=soft_cap,
        reference_end=None if window is None else metadata.span_end,
    )


def _store(
    key: Float[Array, "T K H"] | None,
    value: Float[Array, "T K _value"] | None,
    cache: Any,
    metadata: AttentionMetadata,
) -> Any:
    """Return the cache with a step's keys and values, or as it is where an earlier layer's are."""
    if key is None or value is None:
        return cache
    if isinstance(metadata, DenseAttentionMetadata):
        return cache if cache is None else DenseCache(key, value)
    assert cache is not None, "paged attention needs a cache"
    return cache.write(key, value, metadata.slot_block, metadata.slot_offset)


def without_spans(metadata: AttentionMetadata) -> AttentionMetadata:
    """Return the metadata of a layer in which no token sees a later one, in an image neither."""
    if isinstance(metadata, PagedAttentionMetadata):
        return metadata._replace(span_end=None)
    index = metadata.token_index
    is_past = index[:, None, :] <= index[:, :, None]
    return metadata._replace(mask=metadata.mask & is_past, beyond_window=None)


def with_gaps(metadata: AttentionMetadata) -> AttentionMetadata:
    """Return the metadata of a model whose spans have tokens that see no later one, nor are seen.

    Such a token's `span_end` is as a causal one's. All of a span is in one step. A dense mask says
    by itself what is seen.
    """
    if not isinstance(metadata, PagedAttentionMetadata) or metadata.span_end is None:
        return metadata
    return metadata._replace(is_seen_ahead=metadata.span_end > metadata.token_index + 1)


def write_encoder(
    key: Float[Array, "S K H"],
    value: Float[Array, "S K _value"],
    cache: LayerCache | DenseCache | None,
    metadata: AttentionMetadata,
) -> LayerCache | DenseCache:
    """Write the keys and values of encoder hidden states; in the first step of their requests.

    Without a paged cache, they are all that the result has.
    """
    assert metadata.cross is not None, "the metadata is of a model without cross-attention"
    if isinstance(metadata, DenseAttentionMetadata):
        return DenseCache(key, value)
    assert cache is not None, "paged attention needs a cache"
    assert not isinstance(cache, DenseCache), "paged attention needs a paged cache"
    return cache.write(key, value, metadata.cross.slot_block, metadata.cross.slot_offset)


def cross_attention(
    query: Float[Array, "T N H"],
    cache: LayerCache | DenseCache | None,
    metadata: AttentionMetadata,
    *,
    scale: float,
) -> Float[Array, "T N _value"]:
    """Attend to the encoder hidden states of each query's request, after `write_encoder`.

    What a query that attends to none is given means nothing (`find_attending`). `cache` may be that
    of the layer's self-attention, whose heads it then shares (both tables have blocks of one pool),
    or an entry of its own in `KVCacheSpec.layers`.
    """
    assert metadata.cross is not None, "the metadata is of a model without cross-attention"
    if isinstance(metadata, DenseAttentionMetadata):
        assert isinstance(cache, DenseCache), "the encoder's keys are not written"
        return _dense_across(query, cache, metadata, metadata.cross, scale=scale)
    assert cache is not None, "paged attention needs a cache"
    assert not isinstance(cache, DenseCache), "paged attention needs a paged cache"
    visible = visible_states(metadata, metadata.cross)
    tables = metadata.cross.block_tables
    return _within(query, cache, metadata, tables, visible, None, scale=scale, soft_cap=None)


def find_attending(metadata: AttentionMetadata) -> Bool[Array, " T"]:
    """Return which tokens attend to any of an encoder's hidden states."""
    assert metadata.cross is not None, "the metadata is of a model without cross-attention"
    if isinstance(metadata, DenseAttentionMetadata):
        is_attending = metadata.cross.is_seen.any(-1)
        return jnp.broadcast_to(is_attending, metadata.token_index.shape).reshape(-1)
    end, before = visible_states(metadata, metadata.cross)
    return end > before + 1


def _paged(
    query: Float[Array, "T N H"],
    cache: LayerCache,
    metadata: PagedAttentionMetadata,
    *,
    scale: float,
    window: Window,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "T N _value"]:
    visible = visible_range(metadata, window)
    tables = metadata.block_tables
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
    if metadata.is_seen_ahead is not None:
        # No kernel knows of gaps.
        arguments = (query, cache, metadata, tables, visible, sinks)
        return walk_blocks(*arguments, **options, has_gaps=True)
    return _within(query, cache, metadata, tables, visible, sinks, **options)


def _within(
    query: Float[Array, "T N H"],
    cache: LayerCache,
    metadata: PagedAttentionMetadata,
    block_tables: Int[Array, "R _blocks"],
    visible: tuple[Int[Array, " T"], Int[Array, " T"]],
    sinks: Float[Array, " N"] | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "T N _value"]:
    """Attend to the keys within two ends for each query, by a kernel if the layout has one."""
    arguments = (query, cache, metadata, block_tables, visible, sinks)
    walk = partial(walk_blocks, scale=scale, soft_cap=soft_cap)
    if not isinstance(cache, SlotCache):
        return walk(*arguments)
    kernel = partial(gpu_attention, scale=scale, soft_cap=soft_cap)
    return jax.lax.platform_dependent(*arguments, cuda=kernel, default=walk)


def _dense(
    query: Float[Array, "T N H"],
    key: Float[Array, "T K H"],
    value: Float[Array, "T K _value"],
    metadata: DenseAttentionMetadata,
    *,
    scale: float,
    window: Window,
    soft_cap: float | None,
    sinks: Float[Array, " N"] | None,
    distance_bias: Float[Array, "N _distances"] | None,
) -> Float[Array, "T N _value"]:
    num_sequences, length = metadata.token_index.shape
    mask = metadata.mask
    if window is not None:
        unseen = find_unseen(metadata.token_index, window)
        mask = mask & (metadata.token_index[:, None, :] > unseen[:, :, None])
        if metadata.beyond_window is not None:
            mask = mask | metadata.beyond_window
    shaped = [_by_sequence(x, num_sequences) for x in (query, key, value)]
    bias = None if distance_bias is None else _bias_of_places(distance_bias, length)
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "sinks": sinks, "bias": bias}
    out = dense_attention(*shaped, mask=mask, **options)
    return out.reshape(*query.shape[:2], -1)


def _dense_across(
    query: Float[Array, "T N H"],
    cache: DenseCache,
    metadata: DenseAttentionMetadata,
    cross: DenseCrossMetadata,
    *,
    scale: float,
) -> Float[Array, "T N _value"]:
    num_sequences, length = metadata.token_index.shape
    shaped = [_by_sequence(x, num_sequences) for x in (query, cache.keys, cache.values)]
    mask = jnp.broadcast_to(cross.is_seen, (num_sequences, length, cross.is_seen.shape[2]))
    return dense_attention(*shaped, mask=mask, scale=scale).reshape(*query.shape[:2], -1)


def _by_sequence(rows: Any, num_sequences: int) -> Float[Array, "B _rows _heads _width"]:
    return rows.reshape(num_sequences, -1, *rows.shape[1:])


def _bias_of_places(
    distance_bias: Float[Array, "N _distances"], length: int
) -> Float[Array, "N S S"]:
    """Return what heads add to the score of each pair of places in a sequence."""
    places = jnp.arange(length, dtype=jnp.int32)
    distance = jnp.clip(places[:, None] - places[None, :], 0, distance_bias.shape[1] - 1)
    return distance_bias[:, distance]
