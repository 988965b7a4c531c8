"""JAX's ragged paged attention for TPUs (arXiv 2604.15464 describes its successor).

Causal only: steps with bidirectional image tokens use `paged_attention`, on the same cache.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.layers.attention.kv_cache import HeadSharding, InterleavedCache, pad_heads
from mmjax.layers.attention.metadata import PagedAttentionMetadata

_TABLE_BYTES = 2**19
"""Limit on all block tables, which the kernel keeps in 1 MiB of scalar memory with others."""
_PAGES_PER_BLOCK, _QUERIES_PER_BLOCK = 128, 32
"""The kernel's defaults, for lowering without a TPU, by which it selects tuned sizes."""


class RaggedArguments(NamedTuple):
    """The kernel's arguments, in order."""

    queries: Float[Array, "T N H"]
    kv_pages: Float[Array, "M Q _heads H"]
    kv_lens: Int[Array, " R"]
    page_indices: Int[Array, "R _blocks"]
    cu_q_lens: Int[Array, " _ends"]
    """Cumulative query lengths: int32[R + 1]."""
    num_seqs: Int[Array, " _one"]


def ragged_takes(metadata: PagedAttentionMetadata) -> bool:
    """Return whether the kernel can compute a step."""
    return metadata.span_end is None and metadata.block_tables.size * 4 <= _TABLE_BYTES


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
    num_rows, num_pages = query.shape[0], metadata.block_tables.shape[1]
    is_tuned = jax.default_backend() == "tpu"
    kernel = partial(
        kernels.ragged_paged_attention,
        sm_scale=scale,
        sliding_window=window,
        soft_cap=soft_cap,
        num_kv_pages_per_block=None if is_tuned else min(num_pages, _PAGES_PER_BLOCK),
        num_queries_per_block=None if is_tuned else min(num_rows, _QUERIES_PER_BLOCK),
    )
    out = _on_each_device(kernel, cache.sharding)(*arguments)
    # The kernel does not write the rows of padding.
    is_real = jnp.arange(num_rows, dtype=jnp.int32) < arguments.cu_q_lens[-1]
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
