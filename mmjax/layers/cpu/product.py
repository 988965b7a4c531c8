"""The product `x @ weight.T` with weights as checkpoints keep them: `[out, in]`.

Every platform has its own best program for it; callers do not know which one they get.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier
from jaxtyping import Array, Float

MAX_FEW_ROWS = 16
"""Of a decode step on the CPU: up to here weights, not sums, are what takes the time."""
SHORT_PROMPT_ROWS = 64
"""Packing the weights costs half of such a product. No other number from 17 on is turned round:
there it would add in another order than long prompts do (docs/determinism.md)."""
MIN_WEIGHT_SIZE = 2**18
"""Smaller weights stay in the CPU's caches, and are computed alike for any number of rows."""
LONG_ROW = 1024
"""Numbers in 4 KiB: a CPU's prefetcher forgets a stream of memory at the end of a page."""

Product = Callable[[Float[Array, "T D"], Float[Array, "F D"]], Float[Array, "T F"]]


def product(
    x: Float[Array, "T D"], weight: Float[Array, "F D"], dtype: jnp.dtype | None = None
) -> Float[Array, "T F"]:
    """Return `x @ weight.T`, added up and returned in `dtype` (None: that of the inputs)."""
    by_rows = partial(_by_rows, dtype=dtype)
    on_cpu = by_rows if weight.dtype != jnp.float32 else _choose(x, weight) or by_rows
    if on_cpu is by_rows:
        return by_rows(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=by_rows)


def is_small(weight: Array | jax.ShapeDtypeStruct) -> bool:
    """Return whether products with `weight` give a row the same bits in any number of rows."""
    return weight.size < MIN_WEIGHT_SIZE


def _choose(x: Float[Array, "T D"], weight: Float[Array, "F D"]) -> Product | None:
    """Return the CPU's best program for float32; None: the plain product."""
    rows = x.shape[0]
    if is_small(weight):
        return _by_two_rows if rows == 1 else None
    if not 1 < rows <= MAX_FEW_ROWS and rows != SHORT_PROMPT_ROWS:
        return None
    return _by_pairs if _can_pair(x, weight) else _by_columns


def _by_rows(
    x: Float[Array, "T D"], weight: Float[Array, "F D"], dtype: jnp.dtype | None
) -> Float[Array, "T F"]:
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dims, preferred_element_type=dtype)


def _by_two_rows(x: Float[Array, "1 D"], weight: Float[Array, "F D"]) -> Float[Array, "1 F"]:
    """Multiply as for several rows: a lone one adds in another order, and saves nothing here."""
    return _by_rows(jnp.concatenate([x, jnp.zeros_like(x)]), weight, None)[:1]


def _by_columns(x: Float[Array, "T D"], weight: Float[Array, "F D"]) -> Float[Array, "T F"]:
    """Multiply the other way round: XLA's CPU library then packs `x`, not the weights.

    The barriers keep XLA from undoing both transpositions.
    """
    dims = (((1,), (0,)), ((), ()))
    return optimization_barrier(jax.lax.dot_general(weight, optimization_barrier(x.T), dims)).T


def _can_pair(x: Float[Array, "T D"], weight: Float[Array, "F D"]) -> bool:
    """Return whether pairs pay; never for what a mesh cuts by inputs, which is not that tall."""
    features, width = weight.shape
    is_tall = features % 2 == 0 and features >= 2 * width
    return is_tall and width < LONG_ROW and 2 * x.shape[0] <= MAX_FEW_ROWS


def _by_pairs(x: Float[Array, "T D"], weight: Float[Array, "F D"]) -> Float[Array, "T F"]:
    """Read two rows of the weights as one: the first meets `[x, 0]`, the second `[0, x]`.

    Twice the sums, of which the half would be empty lanes of a register, and longer streams.
    """
    rows, width = x.shape
    none = jnp.zeros_like(x)
    pairs = jnp.concatenate([jnp.hstack([x, none]), jnp.hstack([none, x])])
    out = _by_columns(pairs, weight.reshape(-1, 2 * width))
    return out.reshape(2, rows, -1).transpose(1, 2, 0).reshape(rows, -1)
