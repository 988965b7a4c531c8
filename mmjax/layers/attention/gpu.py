"""Paged attention for CUDA, as one kernel in Pallas (Triton): any mask that metadata can express.

FlashAttention-2 (Dao, arXiv 2307.08691) over block tables: a program attends with some queries of
one request, which share a key-value head, to the range of keys that they see, in tiles. Where there
are few such programs, as in decoding, several share the range, and their results are combined.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.attention.gpu_tiles import (
    LOG2_E,
    NUM_STAGES,
    Parts,
    Sizes,
    State,
    Tiles,
    attend_to_tiles,
    choose_sizes,
    load_rows,
    normalize,
    store_rows,
)
from mmjax.layers.attention.kv_cache import SlotCache
from mmjax.layers.attention.metadata import PagedAttentionMetadata
from mmjax.layers.attention.paged import by_tile
from mmjax.rounding import cdiv

ENOUGH_PROGRAMS = 512
"""Programs that keep the 132 multiprocessors of an H100 busy."""
MAX_SPLITS = 32
_NOWHERE = 2**30
"""Behind the last key of any request."""


class Queries(NamedTuple):
    """Queries in tiles, and the keys that each attends to: the kernel's first arguments."""

    query: Float[Array, "T N H"]
    tile_rows: Int[Array, "W Z"]
    tile_request: Int[Array, " W"]
    upper: Int[Array, "W Z"]
    lower: Int[Array, "W Z"]
    block_tables: Int[Array, "R _blocks"]


def gpu_attention(
    query: Float[Array, "T N _width"],
    cache: SlotCache,
    metadata: PagedAttentionMetadata,
    block_tables: Int[Array, "R _blocks"],
    visible: tuple[Int[Array, " T"], Int[Array, " T"]],
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    soft_cap: float | None,
    interpret: bool = False,
) -> Float[Array, "T N _value"]:
    """Attend to the keys between the ends of `visible`, as `walk_blocks` does; padding gives zeros.

    `sinks` are as in `attention`. `interpret`: run the kernel in XLA, on any platform.
    """
    ends = by_tile(visible, metadata)
    queries = Queries(query, metadata.tile_rows, metadata.tile_request, *ends, block_tables)
    kernel = partial(_attend, scale=scale, soft_cap=soft_cap, interpret=interpret)
    out = _on_each_device(kernel, queries, cache, sinks)
    # The kernel writes no others. Zeros that it were given instead XLA makes of all layers at once:
    # 576 MiB where 36 layers have 2,048 queries of 32 heads.
    slots = jnp.arange(len(query), dtype=jnp.int32)
    is_row = (metadata.tile_rows.reshape(-1)[metadata.row_slot] == slots) & (visible[0] > 0)
    return jnp.where(is_row[:, None, None], out, 0)


def _on_each_device(
    kernel: Callable[..., Array],
    queries: Queries,
    cache: SlotCache,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "T N _value"]:
    """Call the kernel, on several devices on each with its heads."""
    sharding = cache.sharding
    if sharding is None:
        return kernel(queries, cache.keys, cache.values, sinks)
    by_query_heads = PartitionSpec(None, sharding.query_axes)
    by_kv_heads = PartitionSpec(None, None, sharding.kv_axes)
    replicated = [PartitionSpec()] * (len(Queries._fields) - 1)
    return jax.shard_map(
        kernel,
        mesh=sharding.mesh,
        in_specs=(
            Queries._make([by_query_heads, *replicated]),
            by_kv_heads,
            by_kv_heads,
            PartitionSpec(sharding.query_axes),
        ),
        out_specs=by_query_heads,
        check_vma=False,
    )(queries, cache.keys, cache.values, sinks)


def choose_num_splits(num_programs: int, max_tiles: int) -> int:
    """Return how many programs share the at most `max_tiles` tiles of keys of the same rows."""
    return max(1, min(ENOUGH_PROGRAMS // num_programs, max_tiles, MAX_SPLITS))


@partial(jax.jit, static_argnames=("scale", "soft_cap", "interpret"))
def _attend(
    queries: Queries,
    keys: Float[Array, "M Q K H"],
    values: Float[Array, "M Q K _value"],
    sinks: Float[Array, " N"] | None,
    *,
    scale: float,
    soft_cap: float | None,
    interpret: bool,
) -> Float[Array, "T N _value"]:
    """Call the kernel; jitted, so that layers that are alike trace it once."""
    # Imported here: pallas is not needed elsewhere.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    num_tiles, tile_size = queries.tile_rows.shape
    block_size, num_kv_heads, width = keys.shape[1:]
    num_rows = tile_size * (queries.query.shape[1] // num_kv_heads)
    sizes = choose_sizes(num_rows, width, keys.dtype)
    num_cuts = cdiv(num_rows, sizes.num_rows)
    num_splits = choose_num_splits(
        num_cuts * num_kv_heads * num_tiles,
        cdiv(queries.block_tables.shape[1] * block_size, sizes.num_keys),
    )
    is_whole = num_splits == 1 and sinks is None
    out = pl.pallas_call(
        partial(paged_kernel, sizes=sizes, scale=scale, soft_cap=soft_cap),
        grid=(num_cuts * num_splits, num_kv_heads, num_tiles),
        out_shape=_outputs(queries.query, values.shape[3], None if is_whole else num_splits),
        compiler_params=triton.CompilerParams(num_warps=sizes.num_warps, num_stages=NUM_STAGES),
        interpret=interpret,
    )(*queries, keys, values)
    return out[0] if is_whole else _combine(*out, sinks=sinks).astype(queries.query.dtype)


def _outputs(
    query: Float[Array, "T N H"], value_dim: int, num_splits: int | None
) -> list[jax.ShapeDtypeStruct]:
    """Return the kernel's outputs: each split's state; None: the results themselves."""
    rows = query.shape[:2]
    if num_splits is None:
        return [jax.ShapeDtypeStruct((*rows, value_dim), query.dtype)]
    rows = (num_splits, *rows)
    shapes = (rows, rows, (*rows, value_dim))
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _combine(
    peak: Float[Array, "_splits T N"],
    total: Float[Array, "_splits T N"],
    summed: Float[Array, "_splits T N _value"],
    *,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "T N _value"]:
    """Combine the states of the splits; the total of one that saw no key is 0."""
    highest = peak.max(0, keepdims=True)
    scores = None if sinks is None else sinks.astype(jnp.float32)[None, None] * LOG2_E
    if scores is not None:
        highest = jnp.maximum(highest, scores)
    weights = jnp.exp2(peak - highest)
    total = (total * weights).sum(0)
    if scores is not None:
        total = total + jnp.exp2(scores - highest)[0]
    return (summed * weights[..., None]).sum(0) / jnp.maximum(total, 1e-30)[..., None]


class Rows(NamedTuple):
    """A program's rows: queries of a tile, each with the heads that share keys, in turn."""

    token: Int[Array, " _rows"]
    head: Int[Array, " _rows"]
    upper: Int[Array, " _rows"]
    lower: Int[Array, " _rows"]
    is_row: Bool[Array, " _rows"]


def paged_kernel(*refs: Any, sizes: Sizes, scale: float, soft_cap: float | None) -> None:
    """Attend with one cut of a tile's rows to one split of the keys that they see.

    `refs`: of `Queries`, keys and values; then the outputs.
    Cuts and splits are the grid's first axis, so that programs that share keys run side by side.
    """
    from jax.experimental import pallas as pl

    num_queries = len(Queries._fields)
    queries, (keys_ref, values_ref) = Queries(*refs[:num_queries]), refs[num_queries:][:2]
    outputs = refs[num_queries + 2 :]
    num_splits = 1 if len(outputs) == 1 else outputs[0].shape[0]
    cut, split = (part(pl.program_id(0), num_splits) for part in (jax.lax.div, jax.lax.rem))
    kv_head, tile = pl.program_id(1), pl.program_id(2)
    group = queries.query.shape[1] // keys_ref.shape[2]
    slots = cut * sizes.num_rows + jnp.arange(sizes.num_rows, dtype=jnp.int32)
    rows = _load_rows(queries, tile, slots, group)
    rows = rows._replace(head=rows.head + kv_head * group)
    keys_range = _range(rows)
    first, end = _split_range(keys_range, sizes.num_keys, split, num_splits)
    seen = _Seen(queries.tile_request[tile], kv_head, rows, keys_range, sizes.num_keys)
    find = partial(_find_keys, queries.block_tables, seen, keys_ref.shape[1])
    load = partial(_load_keys, keys_ref, values_ref, seen)
    state = attend_to_tiles(
        load_rows(queries.query, (rows.token, rows.head), rows.is_row),
        Tiles(first, end, find, load),
        value_dim=values_ref.shape[3],
        scale=scale,
        soft_cap=soft_cap,
    )
    _store(outputs, state, split, rows)


def _load_rows(queries: Any, tile: Any, slots: Int[Array, " _rows"], group: int) -> Rows:
    """Load what the rows of a tile are, of which `group` in turn are one query's.

    `queries`: references to `Queries`.
    """
    from jax.experimental.pallas import triton

    place, head = jax.lax.div(slots, group), jax.lax.rem(slots, group)
    in_tile = place < queries.tile_rows.shape[1]
    # Padding is out of range.
    fields = (queries.tile_rows, queries.query.shape[0]), (queries.upper, 0), (queries.lower, 0)
    token, upper, lower = (
        triton.load(ref.at[tile, place], mask=in_tile, other=other) for ref, other in fields
    )
    return Rows(token, head, upper, lower, upper > 0)


def _range(rows: Rows) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the first key that any row attends to, and the one after the last."""
    first = jnp.where(rows.is_row, rows.lower + 1, _NOWHERE).min()
    return jnp.maximum(first, 0), rows.upper.max()


def _split_range(
    keys_range: tuple[Int[Array, ""], Int[Array, ""]], num_keys: int, split: Any, num_splits: int
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the tiles of keys of one split, which begin at multiples of their size.

    So a row meets its keys in the same tiles, whatever else its program computes.
    """
    first = jax.lax.div(keys_range[0], num_keys)
    end = jax.lax.div(keys_range[1] + (num_keys - 1), num_keys)
    if num_splits == 1:
        return first, end
    size = jax.lax.div(end - first + (num_splits - 1), num_splits)
    return first + split * size, jnp.minimum(first + (split + 1) * size, end)


class _Seen(NamedTuple):
    """What a program's rows attend to."""

    request: Any
    kv_head: Any
    rows: Rows
    keys_range: tuple[Int[Array, ""], Int[Array, ""]]
    num_keys: int

    def tile(self, number: Int[Array, ""]) -> tuple[Int[Array, " _keys"], Bool[Array, " _keys"]]:
        """Return the indices of a tile's keys, and which of them any row sees.

        The others are not loaded: slots without a token hold anything.
        """
        index = number * self.num_keys + jnp.arange(self.num_keys, dtype=jnp.int32)
        return index, (index >= self.keys_range[0]) & (index < self.keys_range[1])


def _find_keys(
    tables_ref: Any, seen: _Seen, block_size: int, number: Int[Array, ""]
) -> Int[Array, " _keys"]:
    """Load the block of each key of a tile."""
    from jax.experimental.pallas import triton

    index, is_key = seen.tile(number)
    at = (seen.request, jax.lax.div(index, block_size))
    return triton.load(tables_ref.at[at], mask=is_key, other=0)


def _load_keys(
    keys_ref: Any, values_ref: Any, seen: _Seen, number: Int[Array, ""], block: Int[Array, " _keys"]
) -> tuple[Parts, Parts, Bool[Array, "_rows _keys"]]:
    """Load a tile of keys and values from their blocks, and what each row sees of it."""
    index, is_key = seen.tile(number)
    at = (block, jax.lax.rem(index, keys_ref.shape[1]), seen.kv_head)
    upper, lower = seen.rows.upper[:, None], seen.rows.lower[:, None]
    is_visible = (index[None] < upper) & (index[None] > lower)
    return load_rows(keys_ref, at, is_key), load_rows(values_ref, at, is_key), is_visible


def _store(outputs: tuple[Any, ...], state: State, split: Any, rows: Rows) -> None:
    """Store the rows' outputs, or, of several splits, the state."""
    from jax.experimental.pallas import triton

    if len(outputs) == 1:
        store_rows(outputs[0], (rows.token, rows.head), rows.is_row, normalize(state))
        return
    peak_ref, total_ref, summed_ref = outputs
    triton.store(peak_ref.at[split, rows.token, rows.head], state.peak, mask=rows.is_row)
    triton.store(total_ref.at[split, rows.token, rows.head], state.total, mask=rows.is_row)
    store_rows(summed_ref, (split, rows.token, rows.head), rows.is_row, list(state.summed))
