"""The kernel in C++ for tokens that attend one a request, over the cache as XLA lays it out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mmjax.layers.attention.kv_cache import LayerCache, TransposedCache

_KERNELS = {
    ("float32", "float32"): "mmjax_attention_float32",
    ("bfloat16", "uint16"): "mmjax_attention_bfloat16",
}
"""Of the dtypes of queries, and of keys as `layers.cpu.storage` keeps them."""
_MAX_HEAD_DIM = 1024
_MAX_BLOCK_SIZE = 256
_LANES = 16


def cpu_kernel_takes(cache: LayerCache, query_dtype: Any) -> bool:
    """Return whether the kernel attends to such a cache, on a CPU that has it."""
    if not isinstance(cache, TransposedCache):
        return False
    dtypes = (jnp.dtype(query_dtype).name, cache.keys.dtype.name)
    is_whole = cache.block_size % _LANES == 0 and cache.block_size <= _MAX_BLOCK_SIZE
    return dtypes in _KERNELS and is_whole and cache.head_dim <= _MAX_HEAD_DIM


def cpu_attention(
    query: Float[Array, "W K _rows H"],
    cache: TransposedCache,
    tables: Int[Array, "W _blocks"],
    ends: tuple[Int[Array, " W"], Int[Array, " W"]],
    *,
    sinks: Float[Array, "W K _rows"] | None,
    soft_cap: float | None,
) -> Float[Array, "W K _rows _value"]:
    """Attend to the keys between two `ends`, exclusively, in the blocks of each request.

    Sums in float32. A row has the same bits beside any others: keys are added 256 slots at a time,
    counted from the sequence's start, and these groups in order.
    """
    name = _KERNELS[query.dtype.name, cache.keys.dtype.name]
    out = jax.ShapeDtypeStruct((*query.shape[:3], cache.value_dim), query.dtype)
    no_sinks = jnp.zeros((0, *query.shape[1:3]), jnp.float32)
    return jax.ffi.ffi_call(name, out)(
        query,
        cache.keys,
        cache.values,
        tables,
        *ends,
        no_sinks if sinks is None else sinks,
        soft_cap=np.float32(0 if soft_cap is None else soft_cap),
    )
