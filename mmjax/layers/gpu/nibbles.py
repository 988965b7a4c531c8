"""Products of few rows with weights of 4 bits in groups, as one kernel in Pallas (Triton).

XLA writes the whole matrix in 16 bits before it multiplies: six times the bytes of the codes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from mmjax.rounding import cdiv

PACK = 64
"""Codes of 4 bits that share 32 bytes: the first 32 of them are the low halves, then the high."""
MIDDLE = 8
"""The zero of groups that have none of their own."""
_HALF = PACK // 2
_NUM_OUTPUTS = 64
_NUM_BYTES = 128
"""Outputs of a program, and bytes of their rows that it reads at a time."""
_ENOUGH_PROGRAMS = 1056
"""Eight for each of the 132 multiprocessors of an H100."""
_LEAST_ROWS = 16
"""Of the smallest product of tensor cores."""


def takes(x: Any, code: str) -> bool:
    """Return whether the kernel multiplies such inputs with such weights."""
    return code == "uint4" and x.dtype == jnp.bfloat16


def nibble_product(
    x: Float[Array, "T D"],
    codes: UInt8[Array, "F _bytes"],
    scale: Float[Array, "F G"],
    zero: UInt8[Array, "F G"] | None,
    *,
    group_size: int,
    interpret: bool = False,
) -> Float[Array, "T F"]:
    """Return `x @ ((codes - zero) * scale).T` in float32; the arrays are those of `Grouped`.

    Weights are rounded to bfloat16, as XLA's form rounds them. `group_size`: a multiple of 32; 0: a
    row is one group. `interpret`: run the kernel in XLA, on any platform.
    """
    # Imported here: pallas is not needed elsewhere.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (num_rows, width), (num_outputs, num_bytes) = x.shape, codes.shape
    programs, steps = cdiv(num_outputs, _NUM_OUTPUTS), cdiv(num_bytes, _NUM_BYTES)
    per_split = cdiv(steps, max(1, min(_ENOUGH_PROGRAMS // programs, steps)))
    num_splits = cdiv(steps, per_split)
    arrays = (x, codes, scale) if zero is None else (x, codes, scale, zero)
    parts = pl.pallas_call(
        partial(_multiply, per_split=per_split, group_size=group_size or width),
        grid=(programs, num_splits),
        out_shape=jax.ShapeDtypeStruct((num_splits, num_rows, num_outputs), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(*arrays)
    return parts.sum(0)


def _multiply(*refs: Any, per_split: int, group_size: int) -> None:
    """Multiply all rows with some outputs' weights, over one split of the inputs."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    x_ref, codes_ref, scale_ref, *zero_refs, out_ref = refs
    num_rows, num_outputs = x_ref.shape[0], codes_ref.shape[0]
    tile_rows = max(_LEAST_ROWS, 1 << (num_rows - 1).bit_length())
    outputs = pl.program_id(0) * _NUM_OUTPUTS + jnp.arange(_NUM_OUTPUTS, dtype=jnp.int32)
    rows = jnp.arange(tile_rows, dtype=jnp.int32)
    split = pl.program_id(1)

    def load(ref: Any, first: Array, second: Array) -> Array:
        """Load a tile by its rows and columns; zeros where there is nothing."""
        shape = (len(first), len(second))
        at = (
            jnp.broadcast_to(first[:, None], shape),
            jnp.broadcast_to(second[None], shape),
        )
        mask = (first < ref.shape[0])[:, None] & (second < ref.shape[1])[None]
        return triton.load(ref.at[at], mask=mask, other=0)

    def spread(ref: Any, groups: Array) -> Array:
        """Load numbers of groups, one for each 32 columns, to each of these columns."""
        numbers = load(ref, outputs, groups).astype(jnp.float32)
        shape = (*numbers.shape, _HALF)
        return jax.lax.broadcast_in_dim(numbers, shape, (0, 1)).reshape(len(outputs), -1)

    def body(step: Array, total: Array) -> Array:
        first = (split * per_split + step) * _NUM_BYTES
        places = first + jnp.arange(_NUM_BYTES, dtype=jnp.int32)
        blocks = first // _HALF + jnp.arange(_NUM_BYTES // _HALF, dtype=jnp.int32)
        codes = load(codes_ref, outputs, places).astype(jnp.int32)
        for half, halves in enumerate((codes & 15, codes >> 4)):
            columns = (places // _HALF) * PACK + half * _HALF + places % _HALF
            groups = (blocks * PACK + half * _HALF) // group_size
            zero = spread(zero_refs[0], groups) if zero_refs else MIDDLE
            weights = (halves.astype(jnp.float32) - zero) * spread(scale_ref, groups)
            inputs = load(x_ref, rows, columns)
            product = jax.lax.dot_general(
                inputs,
                weights.astype(inputs.dtype),
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            total = total + product
        return total

    total = jnp.zeros((tile_rows, _NUM_OUTPUTS), jnp.float32)
    total = jax.lax.fori_loop(0, per_split, body, total)
    shape = total.shape
    at = (
        split,
        jnp.broadcast_to(rows[:, None], shape),
        jnp.broadcast_to(outputs[None], shape),
    )
    mask = (rows < num_rows)[:, None] & (outputs < num_outputs)[None]
    triton.store(out_ref.at[at], total, mask=mask)
