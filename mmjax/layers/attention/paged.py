"""Paged attention in plain XLA: any platform, any mask, any layout of the KV cache."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from mmjax.layers.attention.cpu import cpu_attention, cpu_kernel_takes
from mmjax.layers.attention.kv_cache import LayerCache, pad_heads
from mmjax.layers.attention.metadata import (
    CrossAttentionMetadata,
    PagedAttentionMetadata,
    Window,
    find_unseen,
)
from mmjax.layers.cpu.dispatch import by_platform
from mmjax.rounding import cdiv, round_up

MASKED = -1e30
"""Finite, so that rows that attend to nothing (padding) give zeros and no NaN."""

SLOTS_AT_ONCE = 128
"""Keys that a tile attends to in one iteration: many small products cost more."""
LARGE_BLOCK = 2**12
"""Elements of keys in a block. From here on decoding, whose products have few rows, computes one
block an iteration, which is faster; below, it sums in the order of prefill, bit for bit."""

COLUMNS_ALIKE = 64
"""XLA gives products of few and of many rows to CPU kernels that add alike where the right side has
16 columns or a multiple of this; not with 24, 32, 48 or 80, as heads may have, and on CPUs without
AVX-512 not with 8."""

State = tuple[Float[Array, "W K Z"], Float[Array, "W K Z"], Float[Array, "W K Z _value"]]
"""State of an online softmax: running maximum, sum of weights, weighted values."""
Attend = Callable[["Tiles"], Float[Array, "W K Z _value"]]
Fold = Callable[[State, Any, Int[Array, "W _blocks"]], State]
"""Adds some blocks of the tiles to the state."""


def apply_soft_cap(logits: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Bound `logits` to (-cap, cap), as Gemma 2 (arXiv 2408.00118, section 2); None: no bound."""
    return logits if cap is None else jnp.tanh(logits / cap) * cap


def visible_range(
    metadata: PagedAttentionMetadata, window: Window
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Return, for the query's own sequence, `Tiles.upper` and `Tiles.lower` of each row."""
    end = metadata.token_index + 1
    if metadata.span_end is not None:
        end = jnp.maximum(end, jnp.abs(metadata.span_end))
    if window is None:
        return end, jnp.full_like(end, -1)
    lower = find_unseen(metadata.token_index, window)
    if metadata.span_end is not None:
        lower = jnp.where(metadata.span_end < 0, -1, lower)
    return end, lower


def visible_states(
    metadata: PagedAttentionMetadata, cross: CrossAttentionMetadata
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Return, for the encoder hidden states of the query's request, the same."""
    if cross.seen is not None:
        first, end = cross.seen
        return end, first - 1
    tile = metadata.row_slot // metadata.tile_rows.shape[1]
    upper = cross.lengths[metadata.tile_request[tile]]
    return upper, jnp.full_like(upper, -1)


class Tiles(NamedTuple):
    """Queries grouped by the heads that they share, one request per tile, and their keys' range."""

    query: Float[Array, "W K Z H"]
    tables: Int[Array, "W _blocks"]
    upper: Int[Array, "W Z"]
    """Index after the last key that a query attends to; 0 for padding."""
    lower: Int[Array, "W Z"]
    """Index before the first one."""
    first: Int[Array, " W"]
    """Index in its table of the first block that a tile attends to."""
    end: Int[Array, " W"]
    """Index after the last one; 0 for padding."""
    sinks: Float[Array, "W K Z"] | None = None
    """The score of a key without a value, which a query sees beside the others; None: of none."""
    causal_end: Int[Array, "W Z"] | None = None
    """Index after the query's own key: behind it, only keys that are seen ahead. None: all are."""
    shift: Int[Array, " W"] | None = None
    """What makes a row of the step of the index of a key that is in it."""
    reference: Int[Array, "W Z"] | None = None
    """Index after the last key that a query attends to whatever `lower` is; None: there is none."""


def walk_blocks(
    query: Float[Array, "T N _width"],
    cache: LayerCache,
    metadata: PagedAttentionMetadata,
    block_tables: Int[Array, "R _blocks"],
    visible: tuple[Int[Array, " T"], Int[Array, " T"]],
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    soft_cap: float | None,
    distance_bias: Float[Array, "N _distances"] | None = None,
    has_gaps: bool = False,
    reference_end: Int[Array, " T"] | None = None,
) -> Float[Array, "T N _value"]:
    """Attend to the blocks of each query's request, within the two ends of what is visible.

    Keys and values are in `cache` already. `sinks` and `distance_bias` are as in `attention`.
    `has_gaps`: of keys behind a query's own, only to those that `metadata.is_seen_ahead` names.
    `reference_end`: where keys end that are visible, too, before the first of these ends.
    """
    scaled = pad_heads(query, cache.head_dim) * scale
    arguments = (scaled, cache, metadata, block_tables, visible, sinks)
    more = {"distance_bias": distance_bias, "has_gaps": has_gaps, "reference_end": reference_end}
    walk = partial(_walk, soft_cap=soft_cap, **more)
    is_plain = not has_gaps and distance_bias is None and reference_end is None
    if not is_plain or not cpu_kernel_takes(cache, query.dtype):
        return walk(*arguments)
    kernel = partial(cpu_attention, soft_cap=soft_cap)
    return by_platform(*arguments, kernel=kernel, cpu=walk, default=walk)


def by_tile(
    visible: tuple[Int[Array, " T"], Int[Array, " T"]], metadata: PagedAttentionMetadata
) -> tuple[Int[Array, "W Z"], Int[Array, "W Z"]]:
    """Return `Tiles.upper` and `Tiles.lower` of those of the rows."""
    upper, lower = visible
    tile_rows = metadata.tile_rows
    return (
        upper.at[tile_rows].get(mode="fill", fill_value=0),
        lower.at[tile_rows].get(mode="fill", fill_value=-1),
    )


def _walk(
    query: Float[Array, "T N H"],
    cache: LayerCache,
    metadata: PagedAttentionMetadata,
    block_tables: Int[Array, "R _blocks"],
    visible: tuple[Int[Array, " T"], Int[Array, " T"]],
    sinks: Float[Array, " N"] | None,
    *,
    soft_cap: float | None,
    distance_bias: Float[Array, "N _distances"] | None,
    has_gaps: bool,
    reference_end: Int[Array, " T"] | None,
) -> Float[Array, "T N _value"]:
    """Attend in XLA; the query is scaled."""
    tiled = _to_tiles(query, cache.num_kv_heads, metadata)
    group = query.shape[1] // cache.num_kv_heads
    # Before the heads are tiled: with sharded heads, this needs no communication.
    ends = by_tile(visible, metadata)
    reference, before = _place_reference(reference_end, ends[1], metadata, group)
    bounds = _block_range(ends[0], before, cache.block_size)
    upper, lower = (jnp.tile(end, (1, group)) for end in ends)
    is_large = cache.num_kv_heads * cache.head_dim * cache.block_size >= LARGE_BLOCK
    of_rows = None if sinks is None else _tile_sinks(sinks, tiled)
    tables = block_tables[metadata.tile_request]
    tiles = Tiles(tiled, tables, upper, lower, *bounds, sinks=of_rows, reference=reference)
    columns = cache.value_dim if is_large else _columns_alike(cache.value_dim)
    is_decoding = metadata.tile_rows.shape[1] == 1
    is_seen = metadata.is_seen_ahead if has_gaps and not is_decoding else None
    if is_seen is not None:
        tiles = _add_gaps(tiles, metadata, group)
    slots = cache.block_size if is_decoding and is_large else SLOTS_AT_ONCE
    most = _columns_alike(block_tables.shape[1] * cache.block_size)  # the scores' columns
    attend = partial(
        _walk_tiles,
        cache=cache,
        blocks_at_once=cdiv(min(slots, most), cache.block_size),
        has_padding=not (is_decoding and is_large),
        soft_cap=soft_cap,
        num_columns=columns,
        distance_bias=distance_bias,
        is_seen=is_seen,
    )

    def at_once(tiles: Tiles) -> Float[Array, "T N _value"]:
        return _from_tiles(attend(tiles), metadata)

    def one_by_one(tiles: Tiles) -> Float[Array, "T N _value"]:
        return _from_tiles(_attend_each_tile(tiles, attend, cache.value_dim), metadata)

    def beside_single_tokens(tiles: Tiles) -> Float[Array, "T N _value"]:
        is_single = _has_one_token(ends[0])
        alone = _attend_single_tokens(tiles, ends, is_single, metadata, attend=attend)
        out = one_by_one(tiles._replace(end=jnp.where(is_single, 0, tiles.end)))
        tile = metadata.row_slot // metadata.tile_rows.shape[1]
        is_alone = is_single[tile][:, None, None]
        return jnp.where(is_alone, alone[metadata.tile_request[tile]], out)

    if is_decoding:
        return at_once(tiles)
    on_cpu = beside_single_tokens if is_large else one_by_one  # small: not worth compiling two
    return jax.lax.platform_dependent(tiles, cpu=on_cpu, default=at_once)


def _place_reference(
    reference_end: Int[Array, " T"] | None,
    lower: Int[Array, "W Z"],
    metadata: PagedAttentionMetadata,
    group: int,
) -> tuple[Int[Array, "W _heads"] | None, Int[Array, "W Z"]]:
    """Return `Tiles.reference`, and for each row the index before the first key of either range."""
    if reference_end is None:
        return None, lower
    reference = reference_end.at[metadata.tile_rows].get(mode="fill", fill_value=0)
    return jnp.tile(reference, (1, group)), jnp.where(reference > 0, -1, lower)


def _add_gaps(tiles: Tiles, metadata: PagedAttentionMetadata, group: int) -> Tiles:
    """Return the tiles with what tells keys behind a query's own apart."""
    own = metadata.token_index.at[metadata.tile_rows].get(mode="fill", fill_value=0)
    # The rows of a request's window stand together.
    return tiles._replace(
        causal_end=jnp.tile(own + 1, (1, group)), shift=metadata.tile_rows[:, 0] - own[:, 0]
    )


def _columns_alike(width: int) -> int:
    """Return how wide a product must be for a row to add alike in tiles of any number of rows."""
    return round_up(width, 16 if width <= 16 else COLUMNS_ALIKE)


def _pad_single_row(tiles: Tiles) -> Tiles:
    """Pad tiles of one row (in decoding, without shared heads) to two.

    On the CPU XLA computes products of one row with other code, which sums in another order.
    """
    if tiles.query.shape[2] > 1:
        return tiles
    sinks = tiles.sinks
    return tiles._replace(
        query=jnp.pad(tiles.query, ((0, 0), (0, 0), (0, 1), (0, 0))),
        upper=jnp.pad(tiles.upper, ((0, 0), (0, 1))),
        lower=jnp.pad(tiles.lower, ((0, 0), (0, 1))),
        reference=(None if tiles.reference is None else jnp.pad(tiles.reference, ((0, 0), (0, 1)))),
        sinks=None if sinks is None else jnp.pad(sinks, ((0, 0), (0, 0), (0, 1))),
    )


def _tile_sinks(
    sinks: Float[Array, " N"], tiled: Float[Array, "W K _rows H"]
) -> Float[Array, "W K _rows"]:
    """Return the sink of each of the tiles' queries, in float32."""
    num_tiles, num_kv_heads, num_rows, _ = tiled.shape
    width = num_rows * num_kv_heads // len(sinks)
    of_rows = jnp.repeat(sinks.astype(jnp.float32), width).reshape(1, num_kv_heads, num_rows)
    return jnp.broadcast_to(of_rows, (num_tiles, num_kv_heads, num_rows))


def _has_one_token(upper: Int[Array, "W Z"]) -> Bool[Array, " W"]:
    """Return which tiles hold one token, as those of requests that decode beside a prompt."""
    return (upper[:, 0] > 0) & (upper[:, 1:] == 0).all(1)


def _attend_single_tokens(
    tiles: Tiles,
    visible: tuple[Int[Array, "W Z"], Int[Array, "W Z"]],
    is_single: Bool[Array, " W"],
    metadata: PagedAttentionMetadata,
    *,
    attend: Attend,
) -> Float[Array, "R N _value"]:
    """Attend with requests that have one token, all at once as in decoding; zeros for others."""
    group = tiles.upper.shape[1] // visible[0].shape[1]
    num_requests, num_tiles = len(metadata.block_tables), len(is_single)
    request = jnp.where(is_single, metadata.tile_request, num_requests)
    tile = jnp.full(num_requests, num_tiles, jnp.int32)
    tile = tile.at[request].set(jnp.arange(num_tiles, dtype=jnp.int32), mode="drop")

    def take(field: Shaped[Array, "W ..."]) -> Shaped[Array, "R ..."]:
        return field.at[tile].get(mode="fill", fill_value=0)

    query = tiles.query.reshape(*tiles.query.shape[:2], group, -1, tiles.query.shape[3])
    upper, lower = (jnp.tile(end[:, :1], (1, group)) for end in visible)
    sinks = tiles.sinks
    if sinks is not None:
        sinks = sinks.reshape(*sinks.shape[:2], group, -1)[..., 0]
    reference = tiles.reference
    if reference is not None:
        reference = reference.reshape(len(reference), group, -1)[..., 0]
    first = query[:, :, :, 0]
    alone = Tiles(first, tiles.tables, upper, lower, tiles.first, tiles.end, sinks)
    alone = alone._replace(reference=reference)
    out = attend(jax.tree.map(take, alone))
    return out.reshape(num_requests, -1, out.shape[3])


def _attend_each_tile(tiles: Tiles, attend: Attend, value_dim: int) -> Float[Array, "W K Z _value"]:
    """Attend tile by tile, each over its own number of blocks.

    The outputs, padded to their width, overwrite the queries: a further array in the loop would be
    copied.
    """
    numbers = jnp.arange(1, len(tiles.end) + 1, dtype=jnp.int32)
    num_tiles = jnp.where(tiles.end > 0, numbers, 0).max()  # without the padding, which is last

    def body(number: Array, query: Float[Array, "W K Z H"]) -> Float[Array, "W K Z H"]:
        fields = tiles._replace(query=query)
        tile = jax.tree.map(lambda field: jax.lax.dynamic_slice_in_dim(field, number, 1), fields)
        out = attend(tile)
        padding = [(0, 0)] * 3 + [(0, query.shape[-1] - value_dim)]
        return jax.lax.dynamic_update_slice_in_dim(query, jnp.pad(out, padding), number, 0)

    out = jax.lax.fori_loop(jnp.zeros_like(num_tiles), num_tiles, body, tiles.query)
    return out[..., :value_dim]


def _walk_tiles(
    tiles: Tiles, cache: LayerCache, *, blocks_at_once: int, has_padding: bool, **options: Any
) -> Float[Array, "W K Z _value"]:
    """Attend to the cache in XLA; `options` are those of `_fold_blocks`."""
    fold = partial(_fold_blocks, cache=cache, **options)
    padded = _pad_single_row(tiles) if has_padding else tiles
    sizes = {"blocks_at_once": blocks_at_once, "block_size": cache.block_size}
    out = _attend_tiles(padded, fold=fold, value_dim=cache.value_dim, **sizes)
    return out[:, :, : tiles.query.shape[2]]


def _attend_tiles(
    tiles: Tiles, *, fold: Fold, blocks_at_once: int, block_size: int, value_dim: int
) -> Float[Array, "W K Z _value"]:
    """Attend block by block with an online softmax (Milakov and Gimelshein, arXiv 1805.02867).

    Blocks are grouped by `blocks_at_once`, equally for all tiles, so that a row sums in the same
    order in any chunk. Blocks that a tile does not attend to leave its state unchanged, bit for
    bit, so that a row does not depend on the number of blocks of other requests.
    """
    first = tiles.first // blocks_at_once * blocks_at_once
    start, num_left_out = _find_gap(tiles, blocks_at_once * block_size)

    def body(number: Array, state: State) -> State:
        group = number + jnp.where(number >= start, num_left_out, 0)
        indices = jnp.arange(blocks_at_once, dtype=jnp.int32)[None]
        return fold(state, tiles, first[:, None] + group[:, None] * blocks_at_once + indices)

    shape, sinks = tiles.query.shape[:3], tiles.sinks
    # A sink is a key that was seen before the others, and gave nothing.
    state = (
        jnp.full(shape, MASKED, jnp.float32) if sinks is None else sinks,
        jnp.full(shape, 0 if sinks is None else 1, jnp.float32),
        jnp.zeros((*shape, value_dim), jnp.float32),
    )
    num_groups = (cdiv(tiles.end - first, blocks_at_once) - num_left_out).max()
    _, total, summed = jax.lax.fori_loop(jnp.zeros_like(num_groups), num_groups, body, state)
    return (summed / jnp.maximum(total, 1e-30)[..., None]).astype(tiles.query.dtype)


def _find_gap(tiles: Tiles, num_keys: int) -> tuple[Int[Array, " W"], Int[Array, " W"]]:
    """Return which group of `num_keys` is the first between a tile's reference and its windows.

    And how many there are, which none of its rows attends to.
    """
    if tiles.reference is None:
        none = jnp.zeros_like(tiles.end)
        return none, none
    is_row, nowhere = tiles.upper > 0, jnp.iinfo(jnp.int32).max
    start = cdiv(jnp.where(is_row, tiles.reference, 0).max(1), num_keys)
    near = jnp.where(is_row, tiles.lower + 1, nowhere).min(1) // num_keys
    return start, jnp.where(tiles.end > 0, jnp.maximum(near - start, 0), 0)


def _block_range(
    upper: Int[Array, "W _rows"], lower: Int[Array, "W _rows"], block_size: int
) -> tuple[Int[Array, " W"], Int[Array, " W"]]:
    """Return each tile's first block, and the one after its last; none for padding."""
    nowhere = jnp.iinfo(jnp.int32).max
    earliest = jnp.where(upper > 0, lower + 1, nowhere).min(1)
    end = cdiv(upper.max(1), block_size)
    return jnp.minimum(jnp.maximum(earliest, 0) // block_size, end), end


def _fold_blocks(
    state: State,
    tiles: Tiles,
    blocks: Int[Array, "W _blocks"],
    *,
    cache: LayerCache,
    soft_cap: float | None,
    num_columns: int,
    distance_bias: Float[Array, "N _distances"] | None,
    is_seen: Bool[Array, " _rows"] | None,
) -> State:
    """Add some blocks, given by their indices in each tile's table, to the state.

    `num_columns`: to which zeros widen the values for their product. `is_seen`: which tokens of the
    step are seen ahead, where not all are.
    """
    peak, total, summed = state
    width = tiles.tables.shape[1]
    ids = jnp.take_along_axis(tiles.tables, jnp.minimum(blocks, width - 1), axis=1)
    keys, values = cache.read_keys(ids), cache.read_values(ids)
    values = jnp.pad(values, [(0, 0)] * 4 + [(0, num_columns - cache.value_dim)])
    offsets = jnp.arange(cache.block_size, dtype=jnp.int32)
    keys_at = (blocks[..., None] * cache.block_size + offsets[None, None])[:, None, None]
    is_near = keys_at > tiles.lower[:, None, :, None, None]
    if tiles.reference is not None:
        is_near |= keys_at < tiles.reference[:, None, :, None, None]
    is_visible = (keys_at < tiles.upper[:, None, :, None, None]) & is_near
    if tiles.causal_end is not None and tiles.shift is not None and is_seen is not None:
        # A key before the step reads any row: its queries, which come behind it, see it.
        rows = keys_at + tiles.shift[:, None, None, None, None]
        is_visible &= (
            (keys_at < tiles.causal_end[:, None, :, None, None])
            # The last one of a span, which sees nothing ahead, is seen.
            | (keys_at == tiles.upper[:, None, :, None, None] - 1)
            | is_seen.at[rows].get(mode="fill", fill_value=False)
        )
    scores = jnp.einsum("wkzh,wbkhq->wkzbq", tiles.query, keys, preferred_element_type=jnp.float32)
    if distance_bias is not None:
        # A causal query is the last key that it attends to.
        distance = tiles.upper[:, :, None, None] - 1 - keys_at[:, 0, 0][:, None]
        distance = jnp.clip(distance, 0, distance_bias.shape[1] - 1)
        scores = scores + jnp.moveaxis(distance_bias.astype(jnp.float32)[:, distance], 0, 1)
    scores = jnp.where(is_visible, apply_soft_cap(scores, soft_cap), MASKED)
    new_peak = jnp.maximum(peak, scores.max((3, 4)))
    # While all keys so far are masked, weights must be 0, not exp(MASKED - MASKED).
    weights = jnp.exp(scores - jnp.maximum(new_peak, MASKED / 2)[..., None, None])
    decay = jnp.exp(peak - new_peak)
    seen = jnp.einsum(
        "wkzbq,wbkqh->wkzh",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )[..., : cache.value_dim]
    return new_peak, total * decay + weights.sum((3, 4)), summed * decay[..., None] + seen


def _to_tiles(
    query: Float[Array, "T N H"], num_kv_heads: int, metadata: PagedAttentionMetadata
) -> Float[Array, "W K _rows H"]:
    """Gather the tiles' queries by the heads that they share: `N / K * Z` rows for each."""
    tiles, width = metadata.tile_rows.shape
    head_dim = query.shape[2]
    tiled = query.at[metadata.tile_rows].get(mode="fill", fill_value=0)
    tiled = tiled.reshape(tiles, width, num_kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    return tiled.reshape(tiles, num_kv_heads, -1, head_dim)


def _from_tiles(
    out: Float[Array, "W K _rows _value"], metadata: PagedAttentionMetadata
) -> Float[Array, "T N _value"]:
    """Undo `_to_tiles`."""
    tiles, width = metadata.tile_rows.shape
    num_kv_heads, value_dim = out.shape[1], out.shape[3]
    out = out.reshape(tiles, num_kv_heads, -1, width, value_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(tiles * width, -1, value_dim)[metadata.row_slot]
