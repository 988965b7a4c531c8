"""Attention with segment ids: rows of packed images attend within their segment.

A segment is an image, or a window, frame or crop of one.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.attention.dense import dense_attention
from mmjax.layers.attention.paged import MASKED

PADDING = -1
"""Segment id of padding."""

BLOCK_SIZE = 256
"""Rows of a block of queries, and of keys."""
MAX_SCORES = 2**22
"""Scores per head of one call without an online softmax: 1,024 queries on 4,096 keys."""


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
    # NOTE: on a TPU `pallas.ops.tpu.flash_attention` with `SegmentIds(q=ids, kv=ids)` should be
    # faster (rows and heads padded to 128, padding as a segment), but was not run on one yet.
    # A GPU waits for the host between two iterations of a loop with a dynamic bound.
    return jax.lax.platform_dependent(
        query,
        key,
        value,
        segment_ids,
        cuda=partial(_masked_attention, scale=scale),
        default=partial(_blockwise_attention, scale=scale),
    )


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
    num_rows = len(query)
    size = min(BLOCK_SIZE, num_rows)
    blocks = Blocks(
        _to_blocks(query, size),
        _to_blocks(key, size),
        _to_blocks(value, size),
        _pad_rows(segment_ids, size, PADDING).reshape(-1, size),
    )
    first, end = _block_range(blocks.segment_ids)
    attend = partial(_attend_block, blocks, scale=scale)
    out = jax.lax.map(attend, (blocks.query, blocks.segment_ids, first, end))  # W N Z H
    out = out.transpose(0, 2, 1, 3).reshape(-1, *query.shape[1:])
    return out[:num_rows].astype(query.dtype)


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
    scores = jnp.einsum("nzh,nsh->nzs", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(is_visible[None], scores * scale, MASKED)
    new = jnp.maximum(highest, scores.max(-1))
    weights = jnp.where(is_visible[None], jnp.exp(scores - new[..., None]), 0.0)
    kept = jnp.exp(highest - new)
    added = jnp.einsum(
        "nzs,nsh->nzh", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return new, total * kept + weights.sum(-1), summed * kept[..., None] + added


def _block_range(segment_ids: Int[Array, "W Z"]) -> tuple[Int[Array, " W"], Int[Array, " W"]]:
    """Return the first block that may have rows of a block's segments, and the one after the last.

    By the minimum and maximum id of each block: exact for ascending ids, else possibly too many.
    """
    is_row = segment_ids >= 0
    least = jnp.where(is_row, segment_ids, jnp.iinfo(jnp.int32).max).min(1)
    greatest = segment_ids.max(1)
    meets = (least[:, None] <= greatest[None, :]) & (least[None, :] <= greatest[:, None])
    first = meets.argmax(1).astype(jnp.int32)
    last = len(segment_ids) - 1 - meets[:, ::-1].argmax(1).astype(jnp.int32)
    return first, jnp.where(meets.any(1), last + 1, first)


def _masked_attention(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    segment_ids: Int[Array, " P"],
    *,
    scale: float,
) -> Float[Array, "P N H"]:
    """Attend to all keys under a mask, a block of queries at a time, by `dense_attention`."""
    num_rows = len(query)
    size = min(num_rows, max(BLOCK_SIZE, MAX_SCORES // num_rows))

    def attend(part: tuple[Float[Array, "Z N H"], Int[Array, " Z"]]) -> Float[Array, "Z N H"]:
        # Padding attends to padding, so that no row is fully masked.
        mask = part[1][:, None] == segment_ids[None]
        return dense_attention(part[0][None], key[None], value[None], mask=mask[None], scale=scale)[
            0
        ]

    if size == num_rows:
        return attend((query, segment_ids))
    queries = _pad_rows(query, size, 0).reshape(-1, size, *query.shape[1:])
    ids = _pad_rows(segment_ids, size, PADDING).reshape(-1, size)
    return jax.lax.map(attend, (queries, ids)).reshape(-1, *query.shape[1:])[:num_rows]


def _is_same(query_ids: Int[Array, " Z"], key_ids: Int[Array, " S"]) -> Bool[Array, "Z S"]:
    return (query_ids[:, None] == key_ids[None]) & (query_ids[:, None] >= 0)


def _to_blocks(rows: Float[Array, "P N H"], size: int) -> Float[Array, "W N Z H"]:
    padded = _pad_rows(rows, size, 0)
    return padded.reshape(-1, size, *rows.shape[1:]).transpose(0, 2, 1, 3)


def _pad_rows(rows: Array, size: int, fill: int) -> Array:
    """Pad rows to a multiple of `size`."""
    widths = [(0, -len(rows) % size), *[(0, 0)] * (rows.ndim - 1)]
    return jnp.pad(rows, widths, constant_values=fill)
