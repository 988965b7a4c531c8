"""The product `x @ weight.T`, weights `[out, in]` as in checkpoints, fast on each platform."""

import platform
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier
from jaxtyping import Array, Float, Int8, Int32, Shaped

from mmjax.layers.cpu.dispatch import Form, by_platform
from mmjax.layers.cpu.library import find_kernels

MAX_FEW_ROWS = 16
"""Rows of a decode step on the CPU up to which reading weights takes most of the time."""
SHORT_PROMPT_ROWS = 64
"""Rows for which packing the weights takes half of the product's time. Other numbers from 17 on are
not transposed: they would sum in another order than long prompts (docs/determinism.md)."""
MIN_WEIGHT_SIZE = 2**17
"""Smaller weights fit into the CPU's caches, and are computed equally for any number of rows."""
LONG_ROW = 1024
"""Floats in 4 KiB: the CPU's prefetcher stops at the end of a page."""
_KERNELS = {
    ("float32", "float32"): ("mmjax_product_float32", jnp.float32),
    ("bfloat16", "bfloat16"): ("mmjax_product_bfloat16", jnp.float32),
    ("float32", "int8"): ("mmjax_product_float32_int8", jnp.float32),
    ("bfloat16", "int8"): ("mmjax_product_bfloat16_int8", jnp.float32),
    ("int8", "int8"): ("mmjax_product_int8", jnp.int32),
}
"""Of the dtypes of `x` and `weight`: the kernel, and the dtype of its sums; that of bfloat16 also
rounds them."""


def product(
    x: Float[Array, "T D"], weight: Float[Array, "F D"], dtype: jnp.dtype | None = None
) -> Float[Array, "T F"]:
    """Return `x @ weight.T`, accumulated and returned in `dtype` (None: the inputs')."""
    by_rows = partial(_by_rows, dtype=dtype)
    form = _choose(x, weight)
    on_cpu = partial(form, dtype=dtype)
    if has_kernel(x, weight) and (not is_small(weight) or _is_tiled(x, weight)):
        kernel = partial(_by_kernel, dtype=dtype or x.dtype)
        return by_platform(x, weight, kernel=kernel, cpu=on_cpu, default=by_rows)
    if form is _by_rows:
        return by_rows(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=by_rows)


def integer_product(x: Int8[Array, "T D"], weight: Int8[Array, "F D"]) -> Int32[Array, "T F"]:
    """Return `x @ weight.T`: exact, in whatever order a device adds; on GPUs to 24 bits."""
    kernel, by_two_rows, by_rows = (
        partial(form, dtype=jnp.dtype(jnp.int32)) for form in (_by_kernel, _by_two_rows, _by_rows)
    )

    def elsewhere(x: Array, weight: Array) -> Array:
        return jax.lax.platform_dependent(x, weight, cuda=_by_bfloat16, default=by_rows)

    if not has_kernel(x, weight):
        return elsewhere(x, weight)
    return by_platform(x, weight, kernel=kernel, cpu=by_two_rows, default=elsewhere)


def _by_bfloat16(x: Int8[Array, "T D"], weight: Int8[Array, "F D"]) -> Int32[Array, "T F"]:
    """Multiply as bfloat16, which has all numbers of 8 bits, with sums in float32.

    XLA 0.11 counts some products of 8 bits twice on Hopper: those in tiles of 16, half of what
    tensor cores add at once (docs/notes/log.md).
    """
    wide, wide_weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    return _by_rows(wide, wide_weight, jnp.dtype(jnp.float32)).astype(jnp.int32)


def widened_product(x: Float[Array, "T D"], weight: Int8[Array, "F D"]) -> Float[Array, "T F"]:
    """Return `x @ weight.T` in float32: weights become numbers of the inputs' dtype."""
    return _widened(x, weight, on_cpu=_by_widened)


def widened_logits(x: Float[Array, "T D"], weight: Int8[Array, "F D"]) -> Float[Array, "T F"]:
    """Return the same, but for inputs that CPUs without kernels round to 15 bits.

    A head's weights are too many to be made wide for a few rows.
    """
    return _widened(x, weight, on_cpu=_by_two_terms)


def _widened(x: Float[Array, "T D"], weight: Int8[Array, "F D"], *, on_cpu: Form) -> Array:
    if not has_kernel(x, weight) or is_small(weight):
        return _by_widened(x, weight)
    kernel = partial(_by_kernel, dtype=jnp.float32)
    return by_platform(x, weight, kernel=kernel, cpu=on_cpu, default=_by_widened)


def has_kernel(x: Any, weight: Any) -> bool:
    """Return whether a kernel multiplies these: rows and dtypes that it knows."""
    return takes_rows(x) and (x.dtype.name, weight.dtype.name) in _KERNELS


def takes_rows(x: Any, num_experts: int = 1) -> bool:
    """Return whether kernels multiply so many rows: few, or, with AMX, any but of floats.

    `num_experts`: that share them; few are then as many for each.
    """
    is_few = 0 < x.shape[0] <= MAX_FEW_ROWS * num_experts
    return is_few or (x.shape[0] > 0 and x.dtype != jnp.float32 and has_tiles())


def _is_tiled(x: Any, weight: Any) -> bool:
    """Return whether tiles multiply any number of these rows, of one even."""
    return is_small(weight) and x.dtype == weight.dtype == jnp.bfloat16 and has_tiles()


def has_tiles() -> bool:
    """Return whether this CPU multiplies tiles of 16 and of 8 bits (AMX), and kernels do."""
    return find_kernels() == "amx"


def _by_kernel(x: Array, weight: Array, dtype: Any) -> Array:
    """Multiply in C++: a row has the same bits beside any others, and beside none."""
    name, sums = _KERNELS[x.dtype.name, weight.dtype.name]
    is_rounded = x.dtype == weight.dtype == dtype == jnp.bfloat16
    shape = (x.shape[0], weight.shape[0])
    out = jax.ShapeDtypeStruct(shape, dtype if is_rounded else sums)
    return jax.ffi.ffi_call(name, out)(x, weight).astype(dtype)


def group_product(
    x: Float[Array, "R D"], weight: Float[Array, "E F D"], sizes: Int32[Array, " E"]
) -> Float[Array, "R F"]:
    """Return `x @ weight[e].T` in float32, by a kernel: rows stand by e, `sizes` rows of each."""
    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call(f"mmjax_groups_{x.dtype.name}", shape)
    return call(x, weight, sizes, few_rows=np.int64(MAX_FEW_ROWS))


def has_group_kernel(x: Any, weight: Any) -> bool:
    """Return whether `group_product` takes these, where the platform has kernels."""
    return x.dtype == weight.dtype and x.dtype in (jnp.float32, jnp.bfloat16)


@cache
def has_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 numbers itself (x86; others: not measured)."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text("utf-8").split())
    except OSError:
        return False
    return not flags.isdisjoint(("avx512_bf16", "amx_bf16"))


def prefers_bfloat16() -> bool:
    """Return whether weights of 16 bits serve best on this CPU as bfloat16, which decodes faster.

    Either the CPU multiplies it itself, or the kernels widen it as they read, in half the time and
    memory of floats; prompts take an eighth longer then (docs/performance.md).
    """
    return has_bfloat16() or find_kernels() is not None


def widens_bfloat16() -> bool:
    """Return whether this CPU multiplies floats faster (x86; others: not measured)."""
    return platform.machine() in ("x86_64", "AMD64") and not has_bfloat16()


def is_small(weight: Array | jax.ShapeDtypeStruct) -> bool:
    """Return whether products with `weight` give a row the same bits in any number of rows."""
    return weight.size < MIN_WEIGHT_SIZE


def _choose(x: Float[Array, "T D"], weight: Float[Array, "F D"]) -> Form:
    """Return XLA's fastest program for the CPU."""
    rows = x.shape[0]
    if x.dtype == weight.dtype == jnp.bfloat16:
        # Of small weights a row has the same bits in any number of rows.
        is_widened = widens_bfloat16() and (rows > MAX_FEW_ROWS or is_small(weight))
        return _by_floats if is_widened else _by_float32_sums
    if weight.dtype != jnp.float32:
        return _by_rows
    if is_small(weight):
        # Of more rows both are one, which is then traced once for all platforms.
        return _by_two_rows if rows == 1 else _by_rows
    if not 1 < rows <= MAX_FEW_ROWS and rows != SHORT_PROMPT_ROWS:
        return _by_rows
    return _by_pairs if _can_pair(x, weight) else _by_columns


def _by_rows(
    x: Shaped[Array, "T D"], weight: Shaped[Array, "F D"], dtype: jnp.dtype | None
) -> Shaped[Array, "T F"]:
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dims, preferred_element_type=dtype)


def _by_float32_sums(
    x: Float[Array, "T D"], weight: Float[Array, "F D"], dtype: jnp.dtype | None
) -> Float[Array, "T F"]:
    """Multiply bfloat16 numbers, add in float32, and round once.

    XLA's CPU library has programs for such sums, from two rows on: a lone row, or sums in bfloat16,
    would take up to ten times as long (docs/notes/log.md). The barrier keeps XLA from fusing what
    was gathered into the product, for which it has no program.
    """
    rows = optimization_barrier(x)
    return _by_two_rows(rows, weight, jnp.dtype(jnp.float32)).astype(dtype or x.dtype)


def _by_floats(
    x: Float[Array, "T D"], weight: Float[Array, "F D"], dtype: jnp.dtype | None
) -> Float[Array, "T F"]:
    """Multiply bfloat16 numbers as floats, made so first, and round once.

    Where the CPU does not multiply bfloat16 numbers itself, XLA's library takes 1.4 times as long
    for many rows of them (docs/notes/log.md).
    """
    wide, wide_weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    form = _choose(wide, wide_weight)
    return form(wide, wide_weight, dtype=jnp.dtype(jnp.float32)).astype(dtype or x.dtype)


def _by_widened(x: Float[Array, "T D"], weight: Int8[Array, "F D"]) -> Float[Array, "T F"]:
    return product(x, weight.astype(x.dtype), jnp.dtype(jnp.float32))


def _by_two_terms(x: Float[Array, "T D"], weight: Int8[Array, "F D"]) -> Float[Array, "T F"]:
    """Multiply integers: inputs become two terms of 8 bits, which miss 2^-16th of the largest."""
    wide = x.astype(jnp.float32)
    step = jnp.maximum(jnp.abs(wide).max(1, keepdims=True) / 127, np.finfo(np.float32).tiny)
    high = jnp.round(wide / step)
    low = jnp.round((wide / step - high) * 254)
    terms = jnp.concatenate([high, low]).astype(jnp.int8)
    sums = _by_two_rows(terms, weight, jnp.dtype(jnp.int32)).astype(jnp.float32)
    return (sums[: len(x)] + sums[len(x) :] / 254) * step


def _by_two_rows(
    x: Shaped[Array, "T D"], weight: Shaped[Array, "F D"], dtype: jnp.dtype | None
) -> Shaped[Array, "T F"]:
    """Pad a lone row to two: XLA's CPU library has another order for it, and is not faster."""
    rows = x if len(x) > 1 else jnp.concatenate([x, jnp.zeros_like(x)])
    return _by_rows(rows, weight, dtype)[: len(x)]


def _by_columns(
    x: Float[Array, "T D"], weight: Float[Array, "F D"], dtype: jnp.dtype | None
) -> Float[Array, "T F"]:
    """Compute the transposed product, for which XLA's CPU library packs `x`, not the weights.

    The barriers keep XLA from undoing both transpositions.
    """
    dims = (((1,), (0,)), ((), ()))
    columns = optimization_barrier(x.T)
    out = jax.lax.dot_general(weight, columns, dims, preferred_element_type=dtype)
    return optimization_barrier(out).T


def _can_pair(x: Float[Array, "T D"], weight: Float[Array, "F D"]) -> bool:
    """Return whether pairs are faster; never for row-parallel weights, which are not that tall."""
    features, width = weight.shape
    is_tall = features % 2 == 0 and features >= 2 * width
    return is_tall and width < LONG_ROW and 2 * x.shape[0] <= MAX_FEW_ROWS


def _by_pairs(
    x: Float[Array, "T D"], weight: Float[Array, "F D"], dtype: jnp.dtype | None
) -> Float[Array, "T F"]:
    """Read two rows of the weights as one, multiplied by `[x, 0]` and `[0, x]`.

    Twice the sums, in register lanes that would be empty, and longer sequential reads.
    """
    rows, width = x.shape
    none = jnp.zeros_like(x)
    pairs = jnp.concatenate([jnp.hstack([x, none]), jnp.hstack([none, x])])
    out = _by_columns(pairs, weight.reshape(-1, 2 * width), dtype)
    return out.reshape(2, rows, -1).transpose(1, 2, 0).reshape(rows, -1)
