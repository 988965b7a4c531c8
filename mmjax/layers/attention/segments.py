"""Attention with segment ids: rows of packed images attend within their segment.

A segment is an image, or a window, frame or crop of one.

Attention within segments for CUDA: a kernel in Pallas (Triton) over the tiles of `gpu_tiles`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.attention.backend import triton_takes
from mmjax.layers.attention.gpu_tiles import (
    NUM_STAGES,
    Parts,
    Sizes,
    Tiles,
    attend_to_tiles,
    choose_sizes,
    load_rows,
    normalize,
    store_rows,
)
from mmjax.layers.attention.paged import MASKED
from mmjax.layers.cpu.dispatch import by_platform
from mmjax.layers.cpu.product import has_tiles
from mmjax.rounding import round_up


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


PADDING = -1
"""Segment id of padding."""

BLOCK_SIZE = 256
"""Rows of a block of queries, and of keys."""
_ROW_STEP = 64
"""Fewer rows are one block of a multiple of these. Over 32 or 96 keys XLA's CPU library adds in
another order than over 64, 128, 192 or 256."""


def segment_attention(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    segment_ids: Int[Array, " P"],
    *,
    scale: float,
) -> Float[Array, "P N H"]:
    """Attend within equal segment ids; outputs of padding are finite.

    Ascending ids (0 0 0 1 1 2 -1 -1) are fastest; any others are correct.
    """
    return _attend(query, key, value, segment_ids, scale)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    segment_ids: Int[Array, " P"],
    scale: float,
) -> Float[Array, "P N H"]:
    # NOTE: on a TPU `pallas.ops.tpu.flash_attention` with `SegmentIds(q=ids, kv=ids)` should be
    # faster (rows and heads padded to 128, padding as a segment), but was not run on one yet.
    arguments = (query, key, value, segment_ids)
    blockwise = partial(_blockwise_attention, scale=scale)
    if query.dtype == value.dtype == jnp.bfloat16 and has_tiles():
        on_cpu = partial(_by_tiles, scale=scale)
        blockwise = partial(by_platform, kernel=on_cpu, cpu=blockwise, default=blockwise)
    if not triton_takes(query.shape[2], query.dtype):
        return blockwise(*arguments)
    kernel = partial(_kernel_attention, scale=scale)
    return jax.lax.platform_dependent(*arguments, cuda=kernel, default=blockwise)


def _by_tiles(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    segment_ids: Int[Array, " P"],
    *,
    scale: float,
) -> Float[Array, "P N H"]:
    """Attend in C++, by AMX: a segment has the same bits wherever it stands."""
    out = jax.ShapeDtypeStruct(query.shape, query.dtype)
    call = jax.ffi.ffi_call("mmjax_segment_attention_bfloat16", out)
    return call(query, key, value, segment_ids.astype(jnp.int32), scale=np.float32(scale))


def refine_segments(
    segment_ids: Int[Array, " P"], part_ids: Int[Array, " P"], *, num_parts: int
) -> Int[Array, " P"]:
    """Return segment ids of the parts (windows) of segments, which are numbered from 0 in each.

    Segments 0 0 0 1 1 -1 in parts 0 0 1 0 1 0 of at most 2: 0 0 1 2 3 -1.
    """
    return jnp.where(segment_ids < 0, PADDING, segment_ids * num_parts + part_ids)


class Blocks(NamedTuple):
    """Rows in blocks, with heads before rows."""

    query: Float[Array, "W N Z H"]
    key: Float[Array, "W N Z H"]
    value: Float[Array, "W N Z H"]
    segment_ids: Int[Array, "W Z"]


State = tuple[Float[Array, "N Z"], Float[Array, "N Z"], Float[Array, "N Z H"]]
"""State of an online softmax: running maximum, sum of weights, weighted values."""


def _blockwise_attention(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    segment_ids: Int[Array, " P"],
    *,
    scale: float,
) -> Float[Array, "P N H"]:
    """Attend by blocks of queries and keys, with an online softmax.

    Each block of queries computes only the range of key blocks with its segments. A block that a
    query does not attend to leaves its state unchanged, bit for bit.
    """
    size = min(BLOCK_SIZE, round_up(len(query), _ROW_STEP))
    blocks = Blocks(
        _to_blocks(query, size),
        _to_blocks(key, size),
        _to_blocks(value, size),
        _pad_rows(segment_ids, size, PADDING).reshape(-1, size),
    )
    first, end = _block_range(blocks.segment_ids, blocks.segment_ids)
    attend = partial(_attend_block, blocks, scale=scale)
    out = jax.lax.map(attend, (blocks.query, blocks.segment_ids, first, end))  # W N Z H
    return _from_blocks(out, query)


def _attend_block(
    blocks: Blocks,
    part: tuple[Float[Array, "N Z H"], Int[Array, " Z"], Int[Array, ""], Int[Array, ""]],
    *,
    scale: float,
) -> Float[Array, "N Z H"]:
    query, segment_ids, first, end = part

    def body(number: Array, state: State) -> State:
        is_visible = _is_same(segment_ids, blocks.segment_ids[number])
        return _fold(state, query, (blocks.key[number], blocks.value[number]), is_visible, scale)

    state = (
        jnp.full(query.shape[:2], MASKED, jnp.float32),
        jnp.zeros(query.shape[:2], jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )
    _, total, summed = jax.lax.fori_loop(first, end, body, state)
    return summed / jnp.maximum(total, 1e-30)[..., None]


def _fold(
    state: State,
    query: Float[Array, "N Z H"],
    keys_and_values: tuple[Float[Array, "N S H"], Float[Array, "N S H"]],
    is_visible: Bool[Array, "Z S"],
    scale: float,
) -> State:
    highest, total, summed = state
    key, value = keys_and_values
    scores = _score(query, key, is_visible, scale)
    new = jnp.maximum(highest, scores.max(-1))
    weights = jnp.where(is_visible[None], jnp.exp(scores - new[..., None]), 0.0)
    kept = jnp.exp(highest - new)
    added = jnp.einsum(
        "nzs,nsh->nzh", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return new, total * kept + weights.sum(-1), summed * kept[..., None] + added


Residuals = tuple[
    Float[Array, "P N H"],
    Float[Array, "P N H"],
    Float[Array, "P N H"],
    Int[Array, " P"],
    Float[Array, "P N H"],
]
"""What the gradient is computed of: the arguments, and the outputs."""


def _attend_forward(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    segment_ids: Int[Array, " P"],
    scale: float,
) -> tuple[Float[Array, "P N H"], Residuals]:
    out: Any = _attend(query, key, value, segment_ids, scale)
    return out, (query, key, value, segment_ids, out)


def _attend_backward(
    scale: float, residuals: Residuals, gradient: Float[Array, "P N H"]
) -> tuple[Float[Array, "P N H"], Float[Array, "P N H"], Float[Array, "P N H"], None]:
    """Return the gradients, block by block (Dao et al., arXiv 2205.14135, appendix B.4).

    Neither kernels nor loops of a number that is found on the device have one of JAX's own.
    """
    query, key, value, segment_ids, out = residuals
    arrays = (query, key, value)
    size = min(BLOCK_SIZE, len(segment_ids))
    ids = _pad_rows(segment_ids, size, PADDING).reshape(-1, size)
    blocks = Blocks(_to_blocks(query, size), _to_blocks(key, size), _to_blocks(value, size), ids)
    given = _to_blocks(gradient.astype(jnp.float32), size)
    # The part of every score's gradient that is the same for all keys of a query.
    shared = (given * _to_blocks(out.astype(jnp.float32), size)).sum(-1)  # W N Z
    differentiate = partial(_differentiate_block, blocks, scale=scale)
    sums = (jnp.zeros(given.shape, jnp.float32), jnp.zeros(given.shape, jnp.float32))
    parts = (blocks.query, ids, given, shared, *_block_range(ids, ids))
    (of_keys, of_values), of_queries = jax.lax.scan(differentiate, sums, parts)
    gradients = [
        blocked.transpose(0, 2, 1, 3)
        .reshape(-1, *array.shape[1:])[: len(array)]
        .astype(array.dtype)
        for array, blocked in zip(arrays, (of_queries, of_keys, of_values), strict=True)
    ]
    return gradients[0], gradients[1], gradients[2], None


_attend.defvjp(_attend_forward, _attend_backward)


def _differentiate_block(
    blocks: Blocks,
    sums: tuple[Float[Array, "W N Z H"], Float[Array, "W N Z H"]],
    part: tuple[
        Float[Array, "N Z H"],
        Int[Array, " Z"],
        Float[Array, "N Z H"],
        Float[Array, "N Z"],
        Int[Array, ""],
        Int[Array, ""],
    ],
    *,
    scale: float,
) -> tuple[tuple[Float[Array, "W N Z H"], Float[Array, "W N Z H"]], Float[Array, "N Z H"]]:
    """Add what one block of queries gives to the keys' and values' gradients; return its own."""
    query, segment_ids, given, shared, first, end = part

    def find_scores(number: Array) -> Float[Array, "N Z Z"]:
        is_visible = _is_same(segment_ids, blocks.segment_ids[number])
        return _score(query, blocks.key[number], is_visible, scale)

    def find_sum(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        highest, total = state
        scores = find_scores(number)
        new = jnp.maximum(highest, scores.max(-1))
        return new, total * jnp.exp(highest - new) + jnp.exp(scores - new[..., None]).sum(-1)

    state = (
        jnp.full(query.shape[:2], MASKED, jnp.float32),
        jnp.zeros(query.shape[:2], jnp.float32),
    )
    highest, total = jax.lax.fori_loop(first, end, find_sum, state)

    def differentiate(
        number: Array, state: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        of_query, of_keys, of_values = state
        is_visible = _is_same(segment_ids, blocks.segment_ids[number])
        exponents = jnp.exp(find_scores(number) - highest[..., None])
        weights = jnp.where(is_visible[None], exponents, 0.0) / jnp.maximum(total, 1e-30)[..., None]
        key, value = (array[number].astype(jnp.float32) for array in (blocks.key, blocks.value))
        of_weights = jnp.einsum("nzh,nsh->nzs", given, value)
        of_scores = weights * (of_weights - shared[..., None]) * scale
        of_key = jnp.einsum("nzs,nzh->nsh", of_scores, query.astype(jnp.float32))
        return (
            of_query + jnp.einsum("nzs,nsh->nzh", of_scores, key),
            of_keys.at[number].add(of_key),
            of_values.at[number].add(jnp.einsum("nzs,nzh->nsh", weights, given)),
        )

    none = jnp.zeros(query.shape, jnp.float32)
    of_query, *sums_then = jax.lax.fori_loop(first, end, differentiate, (none, *sums))
    return (sums_then[0], sums_then[1]), of_query


def _score(
    query: Float[Array, "N Z H"],
    key: Float[Array, "N S H"],
    is_visible: Bool[Array, "Z S"],
    scale: float,
) -> Float[Array, "N Z S"]:
    scores = jnp.einsum("nzh,nsh->nzs", query, key, preferred_element_type=jnp.float32)
    return jnp.where(is_visible[None], scores * scale, MASKED)


def _block_range(
    query_ids: Int[Array, "W Z"], key_ids: Int[Array, "_blocks _keys"]
) -> tuple[Int[Array, " W"], Int[Array, " W"]]:
    """Return the first block of keys that may be of a block's segments, and that after the last.

    By the minimum and maximum id of each block: exact for ascending ids, else possibly too many.
    """
    (least, greatest), (least_key, greatest_key) = _extremes(query_ids), _extremes(key_ids)
    meets = (least[:, None] <= greatest_key[None]) & (least_key[None] <= greatest[:, None])
    first = meets.argmax(1).astype(jnp.int32)
    last = len(key_ids) - 1 - meets[:, ::-1].argmax(1).astype(jnp.int32)
    return first, jnp.where(meets.any(1), last + 1, first)


def _extremes(ids: Int[Array, "W Z"]) -> tuple[Int[Array, " W"], Int[Array, " W"]]:
    """Return each block's least and greatest segment; of padding alone none."""
    return jnp.where(ids >= 0, ids, jnp.iinfo(jnp.int32).max).min(1), ids.max(1)


def _kernel_attention(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    segment_ids: Int[Array, " P"],
    *,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "P N H"]:
    """Attend in the kernel for CUDA, which does not wait for the host where a range ends."""
    sizes = choose_sizes(len(query), query.shape[2], query.dtype)
    rows, keys = (
        _pad_rows(segment_ids, size, PADDING).reshape(-1, size)
        for size in (sizes.num_rows, sizes.num_keys)
    )
    packed = Packed(query, key, value, segment_ids, *_block_range(rows, keys))
    return gpu_segment_attention(packed, sizes=sizes, scale=scale, interpret=interpret)


def _is_same(query_ids: Int[Array, " Z"], key_ids: Int[Array, " S"]) -> Bool[Array, "Z S"]:
    return (query_ids[:, None] == key_ids[None]) & (query_ids[:, None] >= 0)


def _to_blocks(rows: Float[Array, "P N H"], size: int) -> Float[Array, "W N Z H"]:
    padded = _pad_rows(rows, size, 0)
    return padded.reshape(-1, size, *rows.shape[1:]).transpose(0, 2, 1, 3)


def _from_blocks(
    blocked: Float[Array, "W N Z H"], like: Float[Array, "P N H"]
) -> Float[Array, "P N H"]:
    """Undo `_to_blocks`, in the dtype of what it was made of."""
    rows = blocked.transpose(0, 2, 1, 3).reshape(-1, *like.shape[1:])
    return rows[: len(like)].astype(like.dtype)


def _pad_rows(rows: Array, size: int, fill: int) -> Array:
    """Pad rows to a multiple of `size`."""
    widths = [(0, -len(rows) % size), *[(0, 0)] * (rows.ndim - 1)]
    return jnp.pad(rows, widths, constant_values=fill)
