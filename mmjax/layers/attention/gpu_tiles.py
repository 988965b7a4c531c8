"""What kernels for CUDA (Pallas, Triton) share: rows in tiles, and an online softmax over them.

Triton's arrays have sizes that are powers of two. A row of another width is two such arrays, the
second filled up with zeros: 80 are 64 and 16, 576 are 512 and 64.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.attention.paged import MASKED, apply_soft_cap
from mmjax.layers.gpu.capability import gpu_attribute

LEAST = 16
"""Rows, and columns, of the smallest product of tensor cores."""
_MAX_ROWS, _MAX_KEYS = 128, 64
_MAX_EXACT = 32
"""Rows, and keys, of a tile in float32: no tensor core computes exact products of it, and of larger
tiles, or with 4 warps, a thread has more numbers than registers, and writes thousands to memory."""
_QUERY_BYTES, _KEY_BYTES = 2**15, 2**14
"""Bytes of a tile of queries and of one of keys, at most: with the keys and values of three tiles
128 KiB of an H100's shared memory of 227. Before Hopper, two tiles are loaded: 96 KiB and a rest,
which an A100 has; GPUs with 99 KiB take half of each."""
_SHARED_BYTES, _LITTLE = 227 * 2**10, 100 * 2**10
NUM_STAGES = 3
"""Stages of the loop over tiles of keys: two are loaded while one is computed."""
_WIDE = 2**14
"""Numbers of a tile of queries from which its sums need the registers of 8 warps."""
LOG2_E = math.log2(math.e)

Parts = list[Float[Array, "_rows _columns"]]
"""A tile, by the parts of its columns."""


class State(NamedTuple):
    """State of an online softmax."""

    peak: Float[Array, " _rows"]
    """Maximum of the scores so far, in base 2."""
    total: Float[Array, " _rows"]
    summed: tuple[Float[Array, "_rows _columns"], ...]
    """Weighted values, by the parts of their columns."""


class Sizes(NamedTuple):
    """Sizes of a kernel's tiles: powers of two."""

    num_rows: int
    num_keys: int
    num_warps: int


def choose_sizes(num_rows: int, width: int, dtype: Any) -> Sizes:
    """Return the sizes for `num_rows` queries of a width that attend to the same keys."""
    size = jnp.dtype(dtype).itemsize
    is_small = gpu_attribute("shared_memory_per_block_optin", _SHARED_BYTES) < _LITTLE
    query_bytes, key_bytes = (full // (1 + is_small) for full in (_QUERY_BYTES, _KEY_BYTES))
    keys = floor_power(key_bytes // (width * size))
    # By the first part of the columns: a second one is small.
    rows = query_bytes // (floor_power(width) * size)
    is_exact = jnp.dtype(dtype) == jnp.float32
    max_rows, max_keys = (_MAX_EXACT,) * 2 if is_exact else (_MAX_ROWS, _MAX_KEYS)
    rows = max(LEAST, min(ceil_power(num_rows), rows, max_rows))
    num_warps = 8 if is_exact or rows * ceil_power(width) >= _WIDE else 4
    return Sizes(rows, max(LEAST, min(keys, max_keys)), num_warps)


def ceil_power(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def floor_power(number: int) -> int:
    """Return the greatest power of two that is at most `number`; of 0, 1."""
    return 1 << max(number.bit_length() - 1, 0)


def column_parts(width: int) -> list[tuple[int, int]]:
    """Return the first column and the size of each part: 80 is [(0, 64), (64, 16)]."""
    first = max(LEAST, floor_power(width))
    if width <= first:
        return [(0, first)]
    return [(0, first), (first, max(LEAST, ceil_power(width - first)))]


def load_rows(ref: Any, places: Sequence[Any], is_row: Bool[Array, " _rows"]) -> Parts:
    """Load rows of the last axis of `ref`, by their indices in its others; zeros for no row."""
    from jax.experimental.pallas import triton

    return [
        triton.load(ref.at[at], mask=mask, other=0)
        for at, mask in _indices(ref.shape[-1], places, is_row)
    ]


def store_rows(
    ref: Any, places: Sequence[Any], is_row: Bool[Array, " _rows"], parts: Parts
) -> None:
    """Store rows where `load_rows` would load them."""
    from jax.experimental.pallas import triton

    for (at, mask), part in zip(_indices(ref.shape[-1], places, is_row), parts, strict=True):
        triton.store(ref.at[at], part.astype(ref.dtype), mask=mask)


def _indices(
    width: int, places: Sequence[Any], is_row: Bool[Array, " _rows"]
) -> list[tuple[tuple[Any, ...], Bool[Array, "_rows _columns"]]]:
    """Return the indices and the mask of each part of the columns."""
    found = []
    for first, size in column_parts(width):
        shape = (len(is_row), size)
        columns = first + jnp.arange(size, dtype=jnp.int32)
        along = [
            jnp.broadcast_to(place[:, None], shape) if jnp.ndim(place) else place
            for place in places
        ]
        at = (*along, jnp.broadcast_to(columns[None], shape))
        mask = jnp.broadcast_to(is_row[:, None], shape)
        found.append((at, mask if first + size <= width else mask & (columns < width)[None]))
    return found


class Tiles(NamedTuple):
    """Where a program's tiles of keys are, and how they are loaded."""

    first: Int[Array, ""]
    end: Int[Array, ""]
    """Numbers of the first tile, and of the one after the last."""
    find: Callable[[Int[Array, ""]], Any]
    """Load what `load` needs to find a tile, by its number. Called a tile ahead: Triton loads tiles
    ahead only if no load of the same iteration gives their addresses."""
    load: Callable[[Int[Array, ""], Any], tuple[Parts, Parts, Bool[Array, "_rows _keys"]]]
    """Load a tile's keys and values, and which of them each row attends to."""


def attend_to_tiles(
    query: Parts, tiles: Tiles, *, value_dim: int, scale: float, soft_cap: float | None = None
) -> State:
    """Attend to tiles of keys in order."""
    num_rows = len(query[0])

    def body(number: Int[Array, ""], carry: tuple[State, Any]) -> tuple[State, Any]:
        state, found = carry
        keys, values, is_visible = tiles.load(number, found)
        scores = reduce(add, (_product(*parts, 1) for parts in zip(query, keys, strict=True)))
        scores = apply_soft_cap(scores * scale, soft_cap) * LOG2_E
        state = _fold(state, jnp.where(is_visible, scores, MASKED), values)
        return state, tiles.find(number + 1)

    state = State(
        jnp.full(num_rows, MASKED, jnp.float32),
        jnp.zeros(num_rows, jnp.float32),
        tuple(jnp.zeros((num_rows, size), jnp.float32) for _, size in column_parts(value_dim)),
    )
    return jax.lax.fori_loop(tiles.first, tiles.end, body, (state, tiles.find(tiles.first)))[0]


def normalize(state: State) -> Parts:
    """Return the outputs; zeros for rows that attend to nothing."""
    total = jnp.maximum(state.total, 1e-30)[:, None]
    return [part / total for part in state.summed]


def _fold(state: State, scores: Float[Array, "_rows _keys"], values: Parts) -> State:
    """Add a tile of keys to the state (Milakov and Gimelshein, arXiv 1805.02867)."""
    peak = jnp.maximum(state.peak, scores.max(1))
    # While all keys so far are masked, weights must be 0, not exp2(MASKED - MASKED).
    weights = jnp.exp2(scores - jnp.maximum(peak, MASKED / 2)[:, None])
    decay = jnp.exp2(state.peak - peak)
    summed = tuple(
        part * decay[:, None] + _product(weights.astype(value.dtype), value, 0)
        for part, value in zip(state.summed, values, strict=True)
    )
    return State(peak, state.total * decay + weights.sum(1), summed)


def _product(
    left: Float[Array, "_rows _inner"], right: Float[Array, "_some _others"], axis: int
) -> Float[Array, "_rows _columns"]:
    """Multiply over the last axis of `left` and an axis of `right`, with sums in float32."""
    dimensions = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)
