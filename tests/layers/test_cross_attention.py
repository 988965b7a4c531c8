"""Cross-attention over a block table of its own: every query sees all of its encoder, always."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.layers.attention.api import (
    CrossAttentionMetadata,
    attention,
    cross_attention,
    find_attending,
    write_encoder,
)
from mmjax.layers.attention.gpu import gpu_attention
from mmjax.layers.attention.paged import visible_states
from tests.layers.on_gpu import as_on_gpu
from tests.layers.ragged import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Batch,
    Heads,
    answer,
    by_rows,
    by_slots,
    draw_causal_chunk,
    interleave,
    lay_out,
)

MAX_ENCODER_BLOCKS = 6
NUM_STATES = 128
"""Encoder states that a step has room to write."""
HEADS = Heads()
SCALE = 0.25
TOLERANCE = 2e-6

Encoded = list[tuple[np.ndarray, np.ndarray]]
"""Keys and values of each request's encoder, `[length, K, H]`."""


@jax.jit
def run_step(batch: Any, encoder: Any, cache: Any, metadata: Any) -> Any:
    """Run self-attention, the write of new encoder states, and cross-attention, on one cache."""
    query, key, value, cross_query = batch
    own, cache = attention(query, key, value, cache, metadata, scale=SCALE)
    if encoder is not None:
        cache = write_encoder(encoder[0], encoder[1], cache, metadata)
    return own, cross_attention(cross_query, cache, metadata, scale=SCALE), cache


def draw_encoders(generator: np.random.Generator, count: int) -> Encoded:
    lengths = generator.integers(
        1, min(NUM_STATES // count, MAX_ENCODER_BLOCKS * BLOCK_SIZE) + 1, count
    )
    shapes = [(2, length, HEADS.num_kv, HEADS.width) for length in lengths]
    drawn = [generator.normal(size=shape).astype(np.float32) for shape in shapes]
    return [(keys, values) for keys, values in drawn]


def free_blocks(batches: Sequence[Batch], generator: np.random.Generator) -> np.ndarray:
    """Return encoders' tables of blocks that no request's own table holds."""
    used = {block for batch in batches for block in np.ravel(batch.metadata.block_tables).tolist()}
    free = generator.permutation([block for block in range(NUM_BLOCKS) if block not in used])
    return free[: 4 * MAX_ENCODER_BLOCKS].reshape(4, -1).astype(np.int32)


def with_encoders(
    batch: Batch, encoders: Encoded, tables: np.ndarray, *, is_first: bool
) -> tuple[Any, Any]:
    """Return the metadata, and this step's encoder states: only a first step brings them."""
    lengths = np.zeros(len(tables), np.int32)
    lengths[: len(encoders)] = [len(keys) for keys, _ in encoders]
    size = NUM_STATES if is_first else 0
    slot_block, slot_offset = np.full(size, NUM_BLOCKS, np.int32), np.zeros(size, np.int32)
    states = np.full((2, size, HEADS.num_kv, HEADS.width), 9e3, np.float32)
    if is_first:
        at = 0
        for table, encoder in zip(tables, encoders, strict=False):
            places = np.arange(len(encoder[0]))
            rows = at + places
            slot_block[rows], slot_offset[rows] = table[places // BLOCK_SIZE], places % BLOCK_SIZE
            states[:, rows] = encoder
            at += len(places)
    fields: dict[str, Any] = {
        "slot_block": slot_block,
        "slot_offset": slot_offset,
        "lengths": lengths,
        "block_tables": tables,
    }
    return batch.metadata._replace(cross=CrossAttentionMetadata(**fields)), tuple(
        states
    ) if is_first else None


def expected(query: np.ndarray, encoder: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return dense attention without a mask, by the formula, in float64."""
    group = HEADS.num // HEADS.num_kv
    key, value = (np.repeat(x.astype(np.float64), group, 1) for x in encoder)
    scores = np.einsum("tnh,snh->nts", query.astype(np.float64), key) * SCALE
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), value)


@pytest.mark.parametrize("layout", ["transposed", "interleaved", "slots", "rows"])
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 3 else ()) for seed in range(12)]
)
def test_two_steps_are_dense_attention(seed: int, layout: str):
    """A first step writes the encoders' states, a later one brings none, and both see them all."""
    generator = np.random.default_rng(seed)
    encoders = draw_encoders(generator, int(generator.integers(1, 5)))
    steps = [
        [draw_causal_chunk(generator, 0, int(generator.integers(1, 40)), HEADS) for _ in encoders]
        for _ in range(2)
    ]
    batches = [
        lay_out(chunks, num_tokens=192, num_requests=4, tile=64, seed=seed) for chunks in steps
    ]
    tables = free_blocks(batches, generator)
    cache: Any = batches[0].cache
    if layout == "interleaved":
        cache = interleave(cache)
    elif layout == "slots":
        cache = by_slots(cache)
    elif layout == "rows":
        cache = by_rows(cache)
    for is_first, chunks, batch in zip((True, False), steps, batches, strict=True):
        metadata, states = with_encoders(batch, encoders, tables, is_first=is_first)
        cross_query = generator.normal(size=batch.query.shape).astype(np.float32)
        inputs = (batch.query, batch.key, batch.value, cross_query)
        own, crossed, cache = run_step(inputs, states, cache, metadata)
        own, crossed = np.asarray(own), np.asarray(crossed)
        assert np.isfinite(crossed).all(), "padding rows must stay finite"
        for chunk, rows, encoder in zip(chunks, batch.rows, encoders, strict=True):
            np.testing.assert_allclose(own[rows], answer(chunk, scale=SCALE), atol=TOLERANCE)
            np.testing.assert_allclose(
                crossed[rows], expected(cross_query[rows], encoder), atol=TOLERANCE
            )


def draw_seen(generator: np.random.Generator, batch: Batch, encoders: Encoded) -> np.ndarray:
    """Return which states each token attends to, more and more; the first ones to none."""
    seen = np.zeros((2, len(batch.query)), np.int32)
    for rows, (keys, _) in zip(batch.rows, encoders, strict=True):
        ends = np.sort(generator.integers(0, len(keys) + 1, len(rows)))
        firsts = np.minimum(np.sort(generator.integers(0, len(keys) + 1, len(rows))), ends)
        seen[:, rows] = np.where(ends > firsts, (firsts, ends), 0)
    return seen


@pytest.mark.parametrize("layout", ["transposed", "interleaved", "slots", "rows"])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_attend_to_the_states_that_they_are_shown(seed: int, layout: str):
    generator = np.random.default_rng(seed)
    encoders = draw_encoders(generator, 3)
    chunks = [draw_causal_chunk(generator, 0, length, HEADS) for length in (30, 1, 9)]
    batch = lay_out(chunks, num_tokens=192, num_requests=4, tile=64, seed=seed)
    metadata, states = with_encoders(
        batch, encoders, free_blocks([batch], generator), is_first=True
    )
    seen = draw_seen(generator, batch, encoders)
    metadata = metadata._replace(cross=metadata.cross._replace(seen=seen))
    layouts = {"interleaved": interleave, "slots": by_slots, "rows": by_rows}
    cache = layouts.get(layout, lambda cache: cache)(batch.cache)
    inputs = (batch.query, batch.key, batch.value, batch.query)
    crossed = np.asarray(run_step(inputs, states, cache, metadata)[1])
    assert np.isfinite(crossed).all()
    is_attending = np.asarray(find_attending(jax.tree.map(jnp.asarray, metadata)))
    for rows, (keys, values) in zip(batch.rows, encoders, strict=True):
        for row in np.asarray(rows).tolist():
            first, end = seen[:, row]
            assert is_attending[row] == (end > first)
            if end > first:
                own = expected(batch.query[[row]], (keys[first:end], values[first:end]))
                np.testing.assert_allclose(crossed[[row]], own, atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
def test_neighbours_never_matter(seed: int):
    generator = np.random.default_rng(seed)
    encoders = draw_encoders(generator, 4)
    chunks = [draw_causal_chunk(generator, 0, 5, HEADS) for _ in encoders]
    cross_query = generator.normal(size=(5, HEADS.num, HEADS.width)).astype(np.float32)
    outputs = []
    for count in (1, 4):
        batch = lay_out(chunks[:count], num_tokens=192, num_requests=4, tile=64, seed=count)
        tables = free_blocks([batch], generator)
        metadata, states = with_encoders(batch, encoders[:count], tables, is_first=True)
        rows = batch.rows[0]
        query = np.zeros_like(batch.query)
        query[rows] = cross_query
        inputs = (batch.query, batch.key, batch.value, query)
        outputs.append(np.asarray(run_step(inputs, states, batch.cache, metadata)[1])[rows])
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("is_shown_some", [pytest.param(False, marks=pytest.mark.slow), True])
def test_it_is_the_kernel_for_cuda(is_shown_some: bool):
    """Lowered for CUDA both attentions are a kernel; interpreted, it answers as XLA does."""
    generator = np.random.default_rng(0)
    encoders = draw_encoders(generator, 3)
    chunks = [draw_causal_chunk(generator, 0, length, HEADS) for length in (5, 1, 30)]
    batch = lay_out(chunks, num_tokens=96, num_requests=4, tile=32)
    tables = free_blocks([batch], generator)
    metadata, states = with_encoders(batch, encoders, tables, is_first=True)
    if is_shown_some:
        seen = draw_seen(generator, batch, encoders)
        metadata = metadata._replace(cross=metadata.cross._replace(seen=seen))
    inputs = (batch.query, batch.key, batch.value, batch.query)
    arguments = (inputs, states, by_slots(batch.cache), metadata)
    with as_on_gpu():
        text = run_step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("call @_attend") == 2
    assert "stablehlo.while" not in text
    _, expected, cache = run_step(*arguments)
    metadata = jax.tree.map(jnp.asarray, metadata)
    visible = visible_states(metadata, metadata.cross)
    out = gpu_attention(
        jnp.asarray(batch.query),
        cache,
        metadata,
        metadata.cross.block_tables,
        visible,
        scale=SCALE,
        soft_cap=None,
        interpret=True,
    )
    rows = np.concatenate(batch.rows)
    rows = rows[np.asarray(find_attending(metadata))[rows]]
    np.testing.assert_allclose(out[rows], expected[rows], atol=TOLERANCE)


def test_a_model_without_an_encoder_has_no_such_fields():
    batch = lay_out(
        [draw_causal_chunk(np.random.default_rng(0), 0, 5, HEADS)],
        num_tokens=192,
        num_requests=4,
        tile=64,
    )
    assert batch.metadata.cross is None
    assert len(jax.tree.leaves(batch.metadata)) == 7, "spans and cross are not there"
