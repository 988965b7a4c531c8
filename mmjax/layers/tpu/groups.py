"""Products of groups of rows with a matrix each, by JAX's kernel for TPUs, one or several."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.rounding import round_up

_ROWS, _ROW_STEP = 128, 16
"""Rows that the kernel multiplies at once: many, and a multiple of what a register holds."""
_SUBLANES, LANES = 8, 128
_MAX_WIDTH = 4096
"""Inputs that it adds up at once."""
_MATRIX_BYTES = 4 * 2**20
"""Of a matrix that it reads at once: it holds two such parts in 16 MiB, beside rows and sums."""
_MAX_OUTPUTS = 2048


def choose_tiles(num_rows: int, width: int, num_outputs: int, itemsize: int) -> tuple[int, ...]:
    """Return how many rows, inputs and outputs the kernel takes at once, for every TPU's memory."""
    rows = min(_ROWS, round_up(num_rows, _ROW_STEP))
    if width > _MAX_WIDTH:
        # What does not divide the width is masked, which takes time.
        divisors = (size for size in range(_MAX_WIDTH, 0, -LANES) if width % size == 0)
        width = next(divisors, _MAX_WIDTH)
    outputs = max(LANES, _MATRIX_BYTES // (width * itemsize) // LANES * LANES)
    return rows, width, min(outputs, _MAX_OUTPUTS, num_outputs)


def tpu_group_product(
    x: Float[Array, "R D"],
    weight: Float[Array, "E F D"],
    sizes: Int[Array, " E"],
    *,
    cuts_inputs: bool,
    dtype: Any = None,
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """Return `x @ weight[e].T`: rows stand by e, `sizes` rows of each; behind them stands anything.

    XLA's `ragged_dot` copies all matrices to transpose them, in every step. `cuts_inputs`: whether
    devices share the inputs, else the outputs. `dtype`: of what is returned; None: the inputs'.
    `interpret`: as in `gpu_attention`.
    """
    multiply = partial(_multiply, dtype=dtype or x.dtype, interpret=interpret)
    mesh = jax.typeof(weight).sharding.mesh
    if mesh.empty:
        return multiply(x, weight, sizes)
    axes = mesh.axis_names
    if weight.shape[2 if cuts_inputs else 1] % mesh.size:
        of_rows = of_weight = of_outputs = PartitionSpec()
    elif cuts_inputs:
        of_rows, of_weight = PartitionSpec(None, axes), PartitionSpec(None, None, axes)
        of_outputs = PartitionSpec()
    else:
        of_rows, of_weight = PartitionSpec(), PartitionSpec(None, axes)
        of_outputs = PartitionSpec(None, axes)

    def compute(x: Array, weight: Array, sizes: Array) -> Array:
        out = multiply(x, weight, sizes)
        return jax.lax.psum(out, axes) if of_rows != PartitionSpec() else out

    return jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=(of_rows, of_weight, PartitionSpec()),
        out_specs=of_outputs,
        check_vma=False,
    )(x, weight, sizes)


def _multiply(x: Array, weight: Array, sizes: Array, *, dtype: Any, interpret: bool) -> Array:
    # Imported here: pallas is not needed elsewhere.
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    num_rows = len(x)
    tiles = choose_tiles(num_rows, x.shape[1], weight.shape[1], weight.dtype.itemsize)
    padded = jnp.pad(x, ((0, -num_rows % tiles[0]), (0, 0)))
    is_by_inputs = lies_by_inputs(*weight.shape[1:])
    matrices = weight.swapaxes(1, 2) if is_by_inputs else weight
    options = (tiles, None, None, not is_by_inputs, interpret)
    return gmm(padded, matrices, sizes, dtype, *options)[:num_rows]


def lies_by_inputs(num_outputs: int, width: int) -> bool:
    """Return whether a TPU keeps each input's weights together: where that takes less padding."""
    by_inputs = round_up(width, _SUBLANES) * round_up(num_outputs, LANES)
    return by_inputs < round_up(num_outputs, _SUBLANES) * round_up(width, LANES)
