"""Attention within the images of a pack: rows of one segment see each other, and nothing else.

Knows nothing of images: a window, a frame or a crop is a segment as well, with a finer id.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mmjax.layers.attention.dense import dense_attention
from mmjax.layers.attention.paged import MASKED

PADDING = -1
"""Segment of rows that fill a bucket up; they see nobody whom an answer depends on."""

BLOCK_SIZE = 256
"""Rows of the squares that are walked over: what a segment's ragged ends compute in vain."""
MAX_SCORES = 2**22
"""Per head, of one call where whole rows of scores are computed: 1,024 queries on 4,096 keys."""


def segment_attention(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    segment_ids: Int[Array, " P"],
    *,
    scale: float,
) -> Float[Array, "P N H"]:
    """Attend within each run of equal segment ids; finite in the padding's rows.

    Ids that go up from row to row are walked fastest (0 0 0 1 1 2 -1 -1); any others are right.
    """
    # NOTE: a TPU should have a branch of its own here, `pallas.ops.tpu.flash_attention` with
    # `SegmentIds(q=ids, kv=ids)`: rows and heads padded to 128, ids as they are, padding a segment.
    # Until one has been run on a TPU, it gets the walk, which is XLA's like everywhere else.
    # A GPU waits for the host between two rounds of a loop without a fixed end: whole rows there.
    return jax.lax.platform_dependent(
        query,
        key,
        value,
        segment_ids,
        cuda=partial(_in_whole_rows, scale=scale),
        default=partial(_in_squares, scale=scale),
    )


def refine_segments(
    segment_ids: Int[Array, " P"], part_ids: Int[Array, " P"], *, num_parts: int
) -> Int[Array, " P"]:
    """Return ids of the parts of segments (windows), which are numbered from 0 in each.

    Segments 0 0 0 1 1 -1 in parts 0 0 1 0 1 0 of at most 2: 0 0 1 2 3 -1.
    """
    return jnp.where(segment_ids < 0, PADDING, segment_ids * num_parts + part_ids)


class Blocks(NamedTuple):
    """Rows in blocks, heads before positions."""

    query: Float[Array, "W N Z H"]
    key: Float[Array, "W N Z H"]
    value: Float[Array, "W N Z H"]
    segment_ids: Int[Array, "W Z"]


State = tuple[Float[Array, "N Z"], Float[Array, "N Z"], Float[Array, "N Z H"]]
"""Of an online softmax: running maximum, sum of weights, weighted values."""


def _in_squares(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    segment_ids: Int[Array, " P"],
    *,
    scale: float,
) -> Float[Array, "P N H"]:
    """Walk over blocks of keys for each block of queries, with an online softmax.

    Each begins with the first block that holds a row of its own segments, and ends with the last.
    A block that a query does not see leaves its state bit for bit as it was.
    """
    num_rows = len(query)
    size = min(BLOCK_SIZE, num_rows)
    blocks = Blocks(
        _to_blocks(query, size),
        _to_blocks(key, size),
        _to_blocks(value, size),
        _pad_rows(segment_ids, size, PADDING).reshape(-1, size),
    )
    first, end = _blocks_to_walk(blocks.segment_ids)
    walk = partial(_walk_block, blocks, scale=scale)
    out = jax.lax.map(walk, (blocks.query, blocks.segment_ids, first, end))  # W N Z H
    out = out.transpose(0, 2, 1, 3).reshape(-1, *query.shape[1:])
    return out[:num_rows].astype(query.dtype)


def _walk_block(
    blocks: Blocks,
    part: tuple[Float[Array, "N Z H"], Int[Array, " Z"], Int[Array, ""], Int[Array, ""]],
    *,
    scale: float,
) -> Float[Array, "N Z H"]:
    query, segment_ids, first, end = part

    def visit(number: Array, state: State) -> State:
        is_visible = _is_same(segment_ids, blocks.segment_ids[number])
        return _fold(state, query, (blocks.key[number], blocks.value[number]), is_visible, scale)

    state = (
        jnp.full(query.shape[:2], MASKED, jnp.float32),
        jnp.zeros(query.shape[:2], jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )
    _, total, summed = jax.lax.fori_loop(first, end, visit, state)
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


def _blocks_to_walk(segment_ids: Int[Array, "W Z"]) -> tuple[Int[Array, " W"], Int[Array, " W"]]:
    """Return the first block that may hold a row of a block's segments, and the end of the last.

    By the least and the greatest id of each block: exact where ids go up, too many where not.
    """
    is_row = segment_ids >= 0
    least = jnp.where(is_row, segment_ids, jnp.iinfo(jnp.int32).max).min(1)
    greatest = segment_ids.max(1)
    meets = (least[:, None] <= greatest[None, :]) & (least[None, :] <= greatest[:, None])
    first = meets.argmax(1).astype(jnp.int32)
    last = len(segment_ids) - 1 - meets[:, ::-1].argmax(1).astype(jnp.int32)
    return first, jnp.where(meets.any(1), last + 1, first)


def _in_whole_rows(
    query: Float[Array, "P N H"],
    key: Float[Array, "P N H"],
    value: Float[Array, "P N H"],
    segment_ids: Int[Array, " P"],
    *,
    scale: float,
) -> Float[Array, "P N H"]:
    """Attend to the whole pack under a mask, a block of queries at a time; cuDNN where it can."""
    num_rows = len(query)
    size = min(num_rows, max(BLOCK_SIZE, MAX_SCORES // num_rows))

    def attend(part: tuple[Float[Array, "Z N H"], Int[Array, " Z"]]) -> Float[Array, "Z N H"]:
        # Padding sees padding: a row that sees nothing is one more case for a kernel.
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
    """Fill rows up to a multiple of `size`."""
    widths = [(0, -len(rows) % size), *[(0, 0)] * (rows.ndim - 1)]
    return jnp.pad(rows, widths, constant_values=fill)
