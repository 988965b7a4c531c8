"""The kernel in C++ over the cache as XLA lays it out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mmjax.layers.attention.kv_cache import LayerCache, TransposedCache
from mmjax.layers.attention.metadata import PagedAttentionMetadata

_KERNELS = {
    ("float32", "float32"): "mmjax_attention_float32",
    ("bfloat16", "uint16"): "mmjax_attention_bfloat16",
}
"""Of the dtypes of queries, and of keys as `layers.cpu.storage` keeps them."""
_MAX_HEAD_DIM = 1024
_MAX_BLOCK_SIZE = 256


def cpu_kernel_takes(cache: LayerCache, query_dtype: Any) -> bool:
    """Return whether the kernel attends to such a cache, on a CPU that has it."""
    if not isinstance(cache, TransposedCache):
        return False
    dtypes = (jnp.dtype(query_dtype).name, cache.keys.dtype.name)
    fits = cache.block_size <= _MAX_BLOCK_SIZE and cache.head_dim <= _MAX_HEAD_DIM
    return dtypes in _KERNELS and fits


def cpu_attention(
    query: Float[Array, "T N H"],
    cache: TransposedCache,
    metadata: PagedAttentionMetadata,
    block_tables: Int[Array, "R _blocks"],
    ends: tuple[Int[Array, " T"], Int[Array, " T"]],
    sinks: Float[Array, " N"] | None,
    *,
    soft_cap: float | None,
) -> Float[Array, "T N _value"]:
    """Attend to the keys between two `ends`, exclusively, in the blocks of each row's request.

    Sums in float32. A row has the same bits beside any others: keys are added 256 slots at a time,
    counted from the sequence's start, and these groups in order. Rows of no tile are zeros.
    """
    name = _KERNELS[query.dtype.name, cache.keys.dtype.name]
    out = jax.ShapeDtypeStruct((*query.shape[:2], cache.value_dim), query.dtype)
    return jax.ffi.ffi_call(name, out)(
        query,
        cache.keys,
        cache.values,
        block_tables,
        *ends,
        metadata.tile_rows,
        metadata.tile_request,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        soft_cap=np.float32(0 if soft_cap is None else soft_cap),
    )
