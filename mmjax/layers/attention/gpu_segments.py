"""Attention within segments for CUDA: a kernel in Pallas (Triton) over the tiles of `gpu_tiles`."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.attention.gpu_tiles import (
    NUM_STAGES,
    Parts,
    Sizes,
    Tiles,
    attend_to_tiles,
    load_rows,
    normalize,
    store_rows,
)


class Packed(NamedTuple):
    """Rows in segments, and the tiles of keys that each tile of queries meets: the kernel's inputs.

    Ids below 0 are padding.
    """

    query: Float[Array, "P N H"]
    key: Float[Array, "P N H"]
    value: Float[Array, "P N H"]
    segment_ids: Int[Array, " P"]
    first: Int[Array, " W"]
    end: Int[Array, " W"]


@partial(jax.jit, static_argnames=("sizes", "scale", "interpret"))
def gpu_segment_attention(
    packed: Packed, *, sizes: Sizes, scale: float, interpret: bool = False
) -> Float[Array, "P N H"]:
    """Attend within equal ids of the tiles from `first` to `end`; padding gives zeros.

    `sizes`: of the tiles that `first` and `end` number. `interpret`: as in `gpu_attention`.
    """
    # Imported here: pallas is not needed elsewhere.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    query = packed.query
    return pl.pallas_call(
        partial(segment_kernel, sizes=sizes, scale=scale),
        grid=(len(packed.first), query.shape[1]),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        compiler_params=triton.CompilerParams(num_warps=sizes.num_warps, num_stages=NUM_STAGES),
        interpret=interpret,
    )(*packed)


def segment_kernel(*refs: Any, sizes: Sizes, scale: float) -> None:
    """Attend with a tile of one head's queries; `refs`: of `Packed`, and the output."""
    from jax.experimental import pallas as pl

    packed, out_ref = Packed(*refs[:-1]), refs[-1]
    tile, head = pl.program_id(0), pl.program_id(1)
    rows = tile * sizes.num_rows + jnp.arange(sizes.num_rows, dtype=jnp.int32)
    ids = _load_ids(packed.segment_ids, rows)
    state = attend_to_tiles(
        load_rows(packed.query, (rows, head), ids >= 0),
        Tiles(
            packed.first[tile],
            packed.end[tile],
            find=lambda number: _load_ids(packed.segment_ids, _indices(number, sizes)),
            load=partial(_load_keys, packed, head, ids, sizes),
        ),
        value_dim=packed.value.shape[2],
        scale=scale,
    )
    store_rows(out_ref, (rows, head), rows < out_ref.shape[0], normalize(state))


def _indices(number: Int[Array, ""], sizes: Sizes) -> Int[Array, " _keys"]:
    return number * sizes.num_keys + jnp.arange(sizes.num_keys, dtype=jnp.int32)


def _load_ids(ids_ref: Any, rows: Int[Array, " _rows"]) -> Int[Array, " _rows"]:
    from jax.experimental.pallas import triton

    return triton.load(ids_ref.at[rows], mask=rows < ids_ref.shape[0], other=-1)


def _load_keys(
    packed: Any,
    head: Any,
    ids: Int[Array, " _rows"],
    sizes: Sizes,
    number: Int[Array, ""],
    key_ids: Int[Array, " _keys"],
) -> tuple[Parts, Parts, Bool[Array, "_rows _keys"]]:
    """Load a tile of keys and values, and which of them each row attends to."""
    at, is_key = (_indices(number, sizes), head), key_ids >= 0
    is_visible = (ids[:, None] == key_ids[None]) & is_key[None]
    return load_rows(packed.key, at, is_key), load_rows(packed.value, at, is_key), is_visible
