"""Rows of a table that a TPU keeps by columns."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from mmjax.layers.tpu.groups import LANES, lies_by_inputs


def read_rows(table: Shaped[Array, "V D"], ids: Int[Array, " T"]) -> Shaped[Array, "T D"]:
    """Return rows of a table, whose `ids` it has.

    XLA copies a table whose columns lie together to read rows of it, whole and in every step. On
    one TPU as many rows are read as lie side by side, and one of them is kept.
    """

    def gather(table: Array, ids: Array) -> Array:
        return table.at[ids].get(mode="promise_in_bounds")

    if not (lies_by_inputs(*table.shape) and jax.typeof(table).sharding.mesh.empty):
        return gather(table, ids)
    return jax.lax.platform_dependent(table, ids, tpu=_read_sides, default=gather)


def _read_sides(table: Array, ids: Array) -> Array:
    num_rows, width = table.shape
    size = min(LANES, num_rows)

    def read(row: Int[Array, ""]) -> Array:
        start = jnp.minimum(row // LANES * LANES, num_rows - size)
        rows = jax.lax.dynamic_slice(table, (start, jnp.zeros_like(start)), (size, width))
        is_wanted = jnp.arange(size, dtype=row.dtype) == row - start
        return jnp.where(is_wanted[:, None], rows, 0).sum(0, dtype=table.dtype)

    return jax.lax.map(read, ids)
