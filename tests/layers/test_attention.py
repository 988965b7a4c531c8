"""Attention: paged as the formula says, whatever the neighbours; dense as paged."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.engine.device.compilation import compiler_options
from mmjax.layers.attention import dense
from mmjax.layers.attention.api import DenseAttentionMetadata, attention, dense_attention
from mmjax.layers.attention.dense import CACHED_SCORES, MANY_SCORES
from mmjax.layers.attention.kv_cache import TransposedCache
from mmjax.layers.attention.metadata import ChunkWindow
from mmjax.layers.attention.paged import LARGE_BLOCK, SLOTS_AT_ONCE
from mmjax.layers.cpu import dispatch
from tests.kit import each_once
from tests.layers import ragged
from tests.layers.ragged import (
    BLOCK_SIZE,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    Batch,
    Chunk,
    Heads,
    answer,
    by_rows,
    draw_answer_chunk,
    draw_causal_chunk,
    draw_chunk,
    interleave,
    lay_out,
    visible,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "global": {"scale": 0.25},
    "window": {"scale": 0.25, "window": 6},
    "chunks": {"scale": 0.25, "window": ChunkWindow(40)},
    "soft cap": {"scale": 0.5, "soft_cap": 2.0, "window": 20},
    "sinks": {"scale": 0.5, "window": 20, "sinks": np.array([-1.0, 0.5, 2.0, 4.0], np.float32)},
}
TOLERANCE = 2e-6


@pytest.fixture(params=["kernel", "xla"], scope="module", autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Attend in C++ where it was compiled, and then in XLA."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "xla":
            patch.setattr(dispatch, "find_kernels", lambda: None)
        elif dispatch.find_kernels() is None:
            pytest.skip("the kernels were not compiled: no compiler, or no AVX2")
        jax.clear_caches()
        yield request.param
    jax.clear_caches()


@partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "keeps_reference"))
def run(query: Any, key: Any, value: Any, cache: Any, metadata: Any, **options: Any) -> Any:
    return attention(query, key, value, cache, metadata, **options)


def attend(batch: Batch, **options: Any) -> tuple[list[np.ndarray], Any]:
    """Return each chunk's output, and the cache."""
    out, cache = run(batch.query, batch.key, batch.value, batch.cache, batch.metadata, **options)
    out = np.asarray(out)
    assert np.isfinite(out).all(), "padding rows must stay finite"
    return [out[rows] for rows in batch.rows], cache


def draw_mixed(seed: int) -> list[Chunk]:
    """Draw three chunks for 160 rows: first chunks, continuations, a decode row."""
    generator = np.random.default_rng(seed)
    chunks = [
        draw_chunk(generator, int(generator.integers(0, 90)) * int(generator.integers(0, 2)), new)
        for new in (int(generator.integers(1, 80)), int(generator.integers(1, 70)), 1)
    ]
    generator.shuffle(chunks)
    return chunks


def draw_decoding(seed: int) -> list[Chunk]:
    generator = np.random.default_rng(seed)
    return [draw_chunk(generator, int(start), 1) for start in generator.integers(0, 150, size=6)]


def lay_out_mixed(chunks: Sequence[Chunk], tile: int = 64, seed: int = 0) -> Batch:
    return lay_out(chunks, num_tokens=192, num_requests=4, tile=tile, seed=seed)


def lay_out_decoding(chunks: Sequence[Chunk], seed: int = 0) -> Batch:
    return lay_out(chunks, num_tokens=8, num_requests=8, tile=1, seed=seed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("name", "tile"), each_once(OPTIONS, [64, 8]))
def test_paged_is_the_formula(seed: int, name: str, tile: int):
    chunks = draw_mixed(seed)
    outputs, _ = attend(lay_out_mixed(chunks, tile, seed), **OPTIONS[name])
    for chunk, out in zip(chunks, outputs, strict=True):
        np.testing.assert_allclose(out, answer(chunk, **OPTIONS[name]), atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", OPTIONS)
def test_decoding_is_the_formula(seed: int, name: str):
    chunks = draw_decoding(seed)
    outputs, _ = attend(lay_out_decoding(chunks, seed), **OPTIONS[name])
    for chunk, out in zip(chunks, outputs, strict=True):
        np.testing.assert_allclose(out, answer(chunk, **OPTIONS[name]), atol=TOLERANCE)


@pytest.mark.as_served
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", OPTIONS)
def test_neighbours_and_places_never_matter(seed: int, name: str):
    first, *others = draw_mixed(seed)
    alone, _ = attend(lay_out_mixed([first]), **OPTIONS[name])
    crowded, _ = attend(lay_out_mixed([*others, first], seed=seed + 1), **OPTIONS[name])
    np.testing.assert_array_equal(alone[0], crowded[-1])


@pytest.mark.as_served
@pytest.mark.parametrize("seed", range(4))
def test_neighbours_never_matter_when_decoding(seed: int):
    first, *others = draw_decoding(seed)
    alone, _ = attend(lay_out_decoding([first]), **OPTIONS["window"])
    crowded, _ = attend(lay_out_decoding([*others, first], seed=seed + 1), **OPTIONS["window"])
    np.testing.assert_array_equal(alone[0], crowded[-1])


@pytest.mark.as_served
@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads"),
    [
        # By default heads that share keys and such that do not, of two widths.
        pytest.param(width, number, marks=() if number == by_default else pytest.mark.slow)
        for width, by_default in {4: None, 8: 4, 16: None, 24: 2}.items()
        for number in (2, 4)
    ],
)
def test_a_row_has_the_same_bits_in_tiles_of_any_size(head_dim: int, num_kv_heads: int):
    chunk = draw_causal_chunk(np.random.default_rng(0), 0, 96, Heads(4, num_kv_heads, head_dim))
    as_engines = jax.jit(partial(attention, scale=0.3), compiler_options=compiler_options("cpu"))

    def attend_to(chunk: Chunk, tile: int) -> np.ndarray:
        num_tokens = 4 if tile == 1 else 128
        batch = lay_out([chunk], num_tokens=num_tokens, num_requests=4, tile=tile)
        arguments = (batch.query, batch.key, batch.value, batch.cache, batch.metadata)
        return np.asarray(as_engines(*arguments)[0])[batch.rows[0]]

    whole, *others = [attend_to(chunk, tile) for tile in (64, 16)]
    for other in others:
        np.testing.assert_array_equal(whole, other)
    for row in (0, 40, 95):
        until = {name: getattr(chunk, name)[: row + 1] for name in ("query", "key", "value")}
        alone = replace(chunk, start=row, span_end=chunk.span_end[: row + 1], **until)
        np.testing.assert_array_equal(attend_to(alone, 1)[0], whole[row])


@pytest.mark.as_served
@pytest.mark.parametrize("seed", range(4))
def test_blocks_before_the_window_are_not_read(seed: int):
    """Attention to 6 tokens reads one group of blocks, or two, of a long context; NaN shows it."""
    generator = np.random.default_rng(seed)
    chunks = [draw_chunk(generator, start, 1) for start in (3, 100, 132, 133, 160, 190)]
    batch = lay_out_decoding(chunks)
    expected, _ = attend(batch, **OPTIONS["window"])
    tables, cache = batch.metadata.block_tables.copy(), batch.cache
    group = SLOTS_AT_ONCE // cache.block_size
    assert isinstance(cache, TransposedCache)
    cache = TransposedCache(*(part.copy() for part in cache))
    spare = next(block for block in range(len(cache.keys)) if block not in tables)
    for part in cache:
        part[spare] = np.nan
    for number, chunk in enumerate(chunks):
        earliest = max(chunk.start - OPTIONS["window"]["window"] + 1, 0)
        tables[number, : earliest // SLOTS_AT_ONCE * group] = spare
    assert (tables == spare).sum(1).tolist() == [0, 0, 0, 16, 16, 16, 0, 0]
    metadata = batch.metadata._replace(block_tables=tables)
    got, _ = attend(replace(batch, cache=cache, metadata=metadata), **OPTIONS["window"])
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


LARGE = Heads(num=6, num_kv=2, width=LARGE_BLOCK // (2 * BLOCK_SIZE))
REFERENCE: dict[str, Any] = {"scale": 0.05, "window": 6, "keeps_reference": True}


@pytest.mark.as_served
@pytest.mark.parametrize("heads", [Heads(), LARGE])
def test_an_answer_sees_its_prompt_and_a_window(heads: Heads):
    """Parts of prompts, of both and of answers; alone and beside each other, with the same bits."""
    generator = np.random.default_rng(7)
    places = [(30, 0, 50), (3, 20, 30), (40, 120, 1)]
    chunks = [draw_answer_chunk(generator, *place, heads) for place in places]
    outputs, _ = attend(lay_out_mixed(chunks), **REFERENCE)
    for chunk, out in zip(chunks, outputs, strict=True):
        np.testing.assert_allclose(out, answer(chunk, **REFERENCE), atol=TOLERANCE)
    alone, _ = attend(lay_out_decoding(chunks[2:]), **REFERENCE)
    np.testing.assert_allclose(alone[0], outputs[2], atol=TOLERANCE)
    if heads != LARGE:
        np.testing.assert_array_equal(alone[0], outputs[2])


@pytest.mark.as_served
def test_where_no_token_is_an_answers_a_reference_has_no_window():
    chunk = draw_causal_chunk(np.random.default_rng(8), 10, 60, Heads())
    (out,), _ = attend(lay_out_mixed([chunk]), **REFERENCE)
    (expected,), _ = attend(lay_out_mixed([chunk]), scale=REFERENCE["scale"])
    np.testing.assert_array_equal(out, expected)


@pytest.mark.as_served
def test_blocks_between_a_reference_and_the_window_are_not_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ragged, "MAX_BLOCKS", 40)
    generator = np.random.default_rng(9)
    # Keys are computed 128 at once: the prompt is in the first, the window in the third.
    chunk = draw_answer_chunk(generator, 10, 300, 1, Heads())
    batch = lay_out([chunk], num_tokens=8, num_requests=8, tile=1)
    expected, _ = attend(batch, **REFERENCE)
    tables, cache = batch.metadata.block_tables.copy(), batch.cache
    assert isinstance(cache, TransposedCache)
    cache = TransposedCache(*(part.copy() for part in cache))
    spare = next(block for block in range(len(cache.keys)) if block not in tables)
    for part in cache:
        part[spare] = np.nan
    group = SLOTS_AT_ONCE // cache.block_size
    tables[0, group : 2 * group] = spare
    metadata = batch.metadata._replace(block_tables=tables)
    got, _ = attend(replace(batch, cache=cache, metadata=metadata), **REFERENCE)
    np.testing.assert_array_equal(got[0], expected[0])


@pytest.mark.parametrize(
    ("value_dim", "layout", "is_decoding"),
    [
        # By default each layout, and of one also the least and the most, by turns.
        pytest.param(width, layout, is_decoding, marks=() if is_default else pytest.mark.slow)
        for layout in ("transposed", "interleaved", "rows")
        for width in (1, 5, HEAD_DIM - 1)
        for is_decoding in (False, True)
        for is_default in [width == 5 or (layout == "transposed" and is_decoding == (width == 1))]
    ],
)
def test_values_may_be_narrower_than_keys(value_dim: int, is_decoding: bool, layout: str):
    """A value's columns never meet, so these are the first ones of whole values."""
    chunks = draw_decoding(5) if is_decoding else draw_mixed(5)
    batch = lay_out_decoding(chunks) if is_decoding else lay_out_mixed(chunks)
    assert isinstance(batch.cache, TransposedCache)
    cache: Any = batch.cache._replace(values=batch.cache.values[..., :value_dim])
    if layout == "interleaved":
        cache = replace(interleave(batch.cache), value_dim=value_dim)
    elif layout == "rows":
        cache = by_rows(cache)
    narrow = replace(batch, value=batch.value[..., :value_dim], cache=cache)
    outputs, written = attend(narrow, **OPTIONS["soft cap"])
    assert written.value_dim == value_dim
    for chunk, out in zip(chunks, outputs, strict=True):
        expected = answer(chunk, **OPTIONS["soft cap"])[..., :value_dim]
        np.testing.assert_allclose(out, expected, atol=TOLERANCE)


@pytest.mark.parametrize("tile", [1, 64])
def test_sinks_of_large_blocks_are_the_formula(tile: int):
    """Where tokens that decode are computed beside a prompt's tiles, and all at once."""
    generator = np.random.default_rng(6)
    heads = Heads(num=6, num_kv=2, width=LARGE_BLOCK // (2 * BLOCK_SIZE))
    lengths = [(50, 1), (0, 1)] if tile == 1 else [(50, 1), (7, 30), (0, 1)]
    chunks = [draw_causal_chunk(generator, *length, heads) for length in lengths]
    lay = lay_out_decoding if tile == 1 else lay_out_mixed
    sinks = np.array([-1, 3, 0.5, 2, 6, 4], np.float32)
    options: dict[str, Any] = {"scale": 0.05, "sinks": sinks}
    outputs, _ = attend(lay(chunks), **options)
    for chunk, out in zip(chunks, outputs, strict=True):
        np.testing.assert_allclose(out, answer(chunk, **options), atol=TOLERANCE)


def test_padding_writes_nothing():
    chunk = draw_chunk(np.random.default_rng(0), 0, 3)
    batch = lay_out_mixed([chunk])
    _, cache = attend(batch, **OPTIONS["global"])
    assert isinstance(batch.cache, TransposedCache)
    changed = np.asarray(cache.keys) != np.asarray(batch.cache.keys)
    assert changed.sum() == 3 * NUM_KV_HEADS * HEAD_DIM
    block = batch.metadata.block_tables[0, 0]
    np.testing.assert_array_equal(cache.values[block, :, :3], chunk.value.transpose(1, 0, 2))


@pytest.mark.parametrize("name", OPTIONS)
def test_dense_is_the_formula(name: str):
    generator = np.random.default_rng(3)
    chunks = [draw_chunk(generator, 0, 40) for _ in range(2)]
    metadata = DenseAttentionMetadata(
        jnp.tile(jnp.arange(40, dtype=jnp.int32), (2, 1)),
        jnp.asarray([visible(chunk, None) for chunk in chunks]),
    )
    inputs = [
        np.concatenate([getattr(chunk, field) for chunk in chunks])
        for field in ("query", "key", "value")
    ]
    out, cache = run(*inputs, None, metadata, **OPTIONS[name])
    assert cache is None
    expected = np.concatenate([answer(chunk, **OPTIONS[name]) for chunk in chunks])
    np.testing.assert_allclose(out, expected, atol=TOLERANCE)


@pytest.mark.as_served
def test_without_a_mask_all_see_all():
    generator = np.random.default_rng(4)
    query = jnp.asarray(generator.normal(size=(2, 7, NUM_HEADS, HEAD_DIM)), jnp.float32)
    out = dense_attention(query, query, query, mask=None, scale=0.25)
    everything = jnp.ones((2, 7, 7), bool)
    masked = dense_attention(query, query, query, mask=everything, scale=0.25)
    np.testing.assert_array_equal(out, masked)


@pytest.mark.as_served
@pytest.mark.parametrize(("num_kv_heads", "soft_cap"), each_once([2, 4], [None, 2.0]))
def test_heads_of_a_large_picture_are_computed_one_by_one(num_kv_heads: int, soft_cap: float):
    """1,025 rows make three chunks of a head; a mask, of everything, takes the other program."""
    generator = np.random.default_rng(5)
    query, key, value = (
        jnp.asarray(generator.normal(size=(2, 1025, heads, 8)), jnp.float32)
        for heads in (4, num_kv_heads, num_kv_heads)
    )
    assert MANY_SCORES <= 1025 * 1025 * 4
    assert 2 * CACHED_SCORES < 1025 * 1025 < 3 * CACHED_SCORES
    options: dict[str, Any] = {"scale": 0.35, "soft_cap": soft_cap}
    out = dense_attention(query, key, value, mask=None, **options)
    everything = jnp.ones((2, 1025, 1025), bool)
    expected = dense_attention(query, key, value, mask=everything, **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    alone = dense_attention(query[1:], key[1:], value[1:], mask=None, **options)
    np.testing.assert_array_equal(out[1:], alone)


@pytest.mark.parametrize(("num_kv_heads", "soft_cap"), each_once([2, 4], [None, 2.0]))
def test_an_accelerators_parts_of_many_scores_are_as_all_at_once(
    num_kv_heads: int, soft_cap: float, monkeypatch: pytest.MonkeyPatch
):
    """In chunks of 12 of 50 rows, the last of which has padding."""
    generator = np.random.default_rng(5)
    query, key, value = (
        jnp.asarray(generator.normal(size=(3, 50, heads, width)), jnp.float32)
        for heads, width in ((4, 8), (num_kv_heads, 8), (num_kv_heads, 6))
    )
    monkeypatch.setattr(dense, "PARTIAL_SCORES", 3 * 50 * 12)
    options: dict[str, Any] = {"scale": 0.35, "soft_cap": soft_cap}
    out = jax.jit(partial(dense._by_parts, **options))(query, key, value)
    expected = dense_attention(query, key, value, mask=None, **options)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_a_tpu_never_has_all_scores_of_many_pictures():
    """8 of Gemma 3's: 8 GiB."""
    shape = jax.ShapeDtypeStruct((8, 4096, 16, 72), jnp.bfloat16)
    traced = jax.jit(partial(dense_attention, mask=None, scale=0.1)).trace(shape, shape, shape)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "8x512x4096xf32" in text
    assert "4096x4096xf32" not in text
