"""JAX's ragged paged attention for TPUs (arXiv 2604.15464 describes its successor).

Causal only: steps with bidirectional image tokens use `paged_attention`, on the same cache.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.layers.attention.kv_cache import (
    LANES,
    HeadSharding,
    InterleavedCache,
    pad_heads,
)
from mmjax.layers.attention.metadata import PagedAttentionMetadata
from mmjax.rounding import cdiv, round_up

_TABLE_BYTES = 2**19
"""Limit on all block tables, which the kernel keeps in 1 MiB of scalar memory with others."""
_KEY_BYTES, _QUERY_BYTES = 4 * 2**20, 5 * 2**20
"""Of what XLA gives a kernel on every TPU, 16 MiB, for two blocks of keys and values, and for a
block of queries with its sums. Of the rest, scores of `_MAX_KEYS` keys take the most."""
_MAX_KEYS, _MAX_PAGES, _MAX_QUERIES = 512, 128, 32
_SUBLANES = 8
"""Rows of a TPU's registers."""


class RaggedArguments(NamedTuple):
    """The kernel's arguments, in order."""

    queries: Float[Array, "T N H"]
    kv_pages: Float[Array, "M Q _heads H"]
    kv_lens: Int[Array, " R"]
    page_indices: Int[Array, "R _blocks"]
    cu_q_lens: Int[Array, " _ends"]
    """Cumulative query lengths: int32[R + 1]."""
    num_seqs: Int[Array, " _one"]


class RaggedSizes(NamedTuple):
    """What the kernel computes at a time."""

    num_pages: int
    num_queries: int


class HeadBlock(NamedTuple):
    """The heads that the kernel computes together: all of a device's, or some of them."""

    num_heads: int
    num_kv_heads: int
    is_whole: bool

    @classmethod
    def choose(cls, query: Any, cache: InterleavedCache) -> "HeadBlock":
        """Return what the kernel chooses."""
        # Imported here: pallas is not needed elsewhere.
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

        num_heads, num_kv_heads = query.shape[1], cache.num_kv_heads
        if (sharding := cache.sharding) is not None:
            axes = sharding.mesh.shape
            num_heads //= math.prod(axes[name] for name in sharding.query_axes)
            num_kv_heads //= math.prod(axes[name] for name in sharding.kv_axes)
        dtypes = query.dtype, cache.pages.dtype
        block, twice = kernel.get_min_heads_per_blk(num_heads, 2 * num_kv_heads, *dtypes)
        return cls(block, twice // 2, is_whole=block == num_heads)


def ragged_takes(query: Any, cache: InterleavedCache, metadata: PagedAttentionMetadata) -> bool:
    """Return whether the kernel can compute a step."""
    num_requests, num_pages = metadata.block_tables.shape
    # As scalar memory has them.
    table_bytes = 4 * round_up(num_requests, _SUBLANES) * round_up(num_pages, LANES)
    if metadata.span_end is not None or table_bytes > _TABLE_BYTES:
        return False
    heads = HeadBlock.choose(query, cache)
    # Pallas cuts heads at multiples of these.
    is_cut_well = heads.is_whole or heads.num_heads % _SUBLANES == 0
    return is_cut_well and 2 * _page_bytes(heads, cache) <= _KEY_BYTES


def choose_sizes(query: Any, cache: InterleavedCache, num_pages: int) -> RaggedSizes:
    """Return sizes with which the kernel fits into the vector memory of every TPU.

    Its own are for blocks of fewer slots and fewer heads: with 8 heads and 32 slots it takes twice
    what XLA gives it.
    """
    heads = HeadBlock.choose(query, cache)
    pages = _KEY_BYTES // (2 * _page_bytes(heads, cache))
    pages = min(pages, cdiv(_MAX_KEYS, cache.block_size), _MAX_PAGES, num_pages)
    # Of queries and outputs two blocks, and three sums in float32.
    query_bytes = heads.num_heads * LANES * (4 * query.dtype.itemsize + 3 * 4)
    queries = min(_QUERY_BYTES // query_bytes, _MAX_QUERIES, query.shape[0])
    return RaggedSizes(pages, max(1, queries))


def _page_bytes(heads: HeadBlock, cache: InterleavedCache) -> int:
    """Return the bytes of a block's keys and values of such heads."""
    numbers = cache.block_size * 2 * heads.num_kv_heads * cache.head_dim
    return numbers * cache.pages.dtype.itemsize


def ragged_attention(
    query: Float[Array, "T N H"],
    cache: InterleavedCache,
    metadata: PagedAttentionMetadata,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N _value"]:
    """Attend to the query's own sequence, whose keys and values are in `cache` already."""
    # Imported here: pallas is not needed elsewhere.
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as kernels

    arguments = to_arguments(query, cache, metadata)
    sizes = choose_sizes(query, cache, metadata.block_tables.shape[1])
    kernel = partial(
        kernels.ragged_paged_attention,
        sm_scale=scale,
        sliding_window=window,
        soft_cap=soft_cap,
        num_kv_pages_per_block=sizes.num_pages,
        num_queries_per_block=sizes.num_queries,
    )
    out = _on_each_device(kernel, cache.sharding)(*arguments)
    # The kernel does not write the rows of padding.
    is_real = jnp.arange(query.shape[0], dtype=jnp.int32) < arguments.cu_q_lens[-1]
    return jnp.where(is_real[:, None, None], out, 0)[..., : cache.value_dim]


def _on_each_device(
    kernel: Callable[..., Array], sharding: HeadSharding | None
) -> Callable[..., Array]:
    """Run the kernel on each device's heads, with replicated lengths and tables."""
    if sharding is None:
        return kernel
    queries = PartitionSpec(None, sharding.query_axes)
    pages = PartitionSpec(None, None, sharding.kv_axes)
    everywhere = [PartitionSpec()] * (len(RaggedArguments._fields) - 2)
    return jax.shard_map(
        kernel,
        mesh=sharding.mesh,
        in_specs=(queries, pages, *everywhere),
        out_specs=queries,
        check_vma=False,
    )


def to_arguments(
    query: Float[Array, "T N _width"], cache: InterleavedCache, metadata: PagedAttentionMetadata
) -> RaggedArguments:
    """Return the kernel's arguments, under jit; equal in all layers, so computed once a step."""
    num_rows = query.shape[0]
    in_tile = metadata.tile_rows < num_rows
    ends = (metadata.token_index + 1).at[metadata.tile_rows].get(mode="fill", fill_value=0)
    zeros = jnp.zeros(metadata.block_tables.shape[0], jnp.int32)
    of_request = zeros.at[metadata.tile_request]
    q_lens = of_request.add(in_tile.sum(1, dtype=jnp.int32))
    kv_lens = of_request.max(ends.max(1))
    # A warm-up step has no request, for which the kernel would not await the copy that it starts.
    q_lens, kv_lens = q_lens.at[0].max(1), kv_lens.at[0].max(1)
    starts = jnp.cumsum(q_lens, dtype=jnp.int32)
    return RaggedArguments(
        queries=pad_heads(query, cache.head_dim),
        kv_pages=cache.pages,
        kv_lens=kv_lens,
        page_indices=metadata.block_tables,
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), starts]),
        num_seqs=(q_lens > 0).sum(dtype=jnp.int32)[None],
    )
