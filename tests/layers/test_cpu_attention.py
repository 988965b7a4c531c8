"""Attention in C++: as the formula says, whatever stands beside a token, in chunks or alone."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.layers.attention.api import attention, dense_attention
from mmjax.layers.attention.kv_cache import LayerKVSpec, TransposedCache
from mmjax.layers.attention.metadata import ChunkWindow, PagedAttentionMetadata, Window
from mmjax.layers.attention.paged import visible_range, walk_blocks
from mmjax.layers.cpu import dispatch
from mmjax.layers.cpu.library import find_kernels
from mmjax.layers.cpu.product import has_tiles
from mmjax.layers.cpu.storage import storage_dtype, to_storage
from tests.layers.ragged import Chunk, Heads, draw_causal_chunk, lay_out

pytestmark = pytest.mark.skipif(
    find_kernels() is None, reason="the kernels were not compiled: no compiler, or no AVX2"
)

SPARE_BLOCKS = 3


class Shape(NamedTuple):
    """Heads of a layer, and slots of a block."""

    num_kv: int
    group: int
    width: int
    value: int
    block_size: int = 32


SHAPES = {
    "heads of 256 that share one": Shape(1, 4, 256, 256),
    "each its own": Shape(8, 1, 128, 128),
    "odd widths, seven heads": Shape(3, 7, 72, 72),
    "a latent": Shape(1, 16, 576, 512),
    "small blocks": Shape(4, 2, 64, 64, 16),
    "blocks of 4": Shape(2, 2, 16, 16, 4),
    "blocks of 20": Shape(1, 4, 24, 24, 20),
    "a block of 48": Shape(2, 3, 64, 40, 48),
    "a block a group": Shape(1, 2, 64, 64, 256),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "global": {},
    "window": {"window": 70},
    "chunks": {"window": ChunkWindow(100)},
    "a cap far above": {"soft_cap": 1e6},
    "soft cap and sinks": {"soft_cap": 2.0, "window": 300, "has_sinks": True},
}
FIRST = next(iter(SHAPES))
PAIRS = [
    # By default each shape and each option.
    pytest.param(shape, name, marks=() if name == "global" or shape == FIRST else pytest.mark.slow)
    for shape in SHAPES
    for name in OPTIONS
]
LENGTHS = (1, 15, 16, 33, 256, 257, 511, 700)


class Tokens(NamedTuple):
    """The last tokens of requests of some lengths."""

    query: np.ndarray
    cache: TransposedCache
    tables: np.ndarray
    lengths: np.ndarray
    sinks: np.ndarray | None


def draw(shape: Shape, lengths: tuple[int, ...], dtype: str, *, has_sinks: bool) -> Tokens:
    """Return tokens whose blocks lie in random places; what they do not see is not a number."""
    rng = np.random.default_rng(0)
    width = -(-max(lengths) // shape.block_size)
    num_blocks = len(lengths) * width + SPARE_BLOCKS
    tables = rng.permutation(num_blocks)[: len(lengths) * width].reshape(len(lengths), width)
    keys = np.full((num_blocks, shape.num_kv, shape.width, shape.block_size), np.nan)
    values = np.full((num_blocks, shape.num_kv, shape.block_size, shape.value), np.nan)
    for table, length in zip(tables, lengths, strict=True):
        for index in range(length):
            block, slot = table[index // shape.block_size], index % shape.block_size
            keys[block, :, :, slot] = rng.standard_normal((shape.num_kv, shape.width))
            values[block, :, slot] = rng.standard_normal((shape.num_kv, shape.value))
    layer = LayerKVSpec(num_kv_heads=shape.num_kv, head_dim=shape.width, value_dim=shape.value)
    stored = storage_dtype(jnp.dtype(dtype), "cpu")
    empty = TransposedCache.zeros(layer, 1, shape.block_size, stored, None)
    arrays = (to_storage(jnp.asarray(x, dtype), empty.keys.dtype) for x in (keys, values))
    num_heads = shape.num_kv * shape.group
    query = rng.standard_normal((len(lengths), num_heads, shape.width)).astype(jnp.dtype(dtype))
    sinks = rng.standard_normal(num_heads).astype(np.float32) if has_sinks else None
    tables = tables.astype(np.int32)
    return Tokens(query, TransposedCache(*arrays), tables, np.asarray(lengths), sinks)


def take(tokens: Tokens, rows: list[int]) -> Tokens:
    index = np.asarray(rows)
    return tokens._replace(
        query=tokens.query[index], tables=tokens.tables[index], lengths=tokens.lengths[index]
    )


def lay_out_tokens(tokens: Tokens, tile: int) -> PagedAttentionMetadata:
    """Return the metadata of a step with tiles of `tile` rows, of which each has one token."""
    count = len(tokens.lengths)
    rows = np.arange(count, dtype=np.int32)
    tile_rows = np.full((count, tile), count, np.int32)
    tile_rows[:, 0] = rows
    fields: dict[str, Any] = {
        "slot_block": np.zeros(count, np.int32),
        "slot_offset": np.zeros(count, np.int32),
        "token_index": (tokens.lengths - 1).astype(np.int32),
        "span_end": None,
        "tile_rows": tile_rows,
        "tile_request": rows,
        "row_slot": rows * tile,
        "block_tables": tokens.tables,
    }
    return PagedAttentionMetadata(**fields)


@partial(jax.jit, static_argnames=("window", "soft_cap"))
def walk(
    query: Any, cache: Any, metadata: Any, sinks: Any, *, window: Window, soft_cap: float | None
) -> Any:
    options: dict[str, Any] = {"scale": query.shape[2] ** -0.5, "soft_cap": soft_cap}
    visible = visible_range(metadata, window)
    return walk_blocks(query, cache, metadata, metadata.block_tables, visible, sinks, **options)


def attend(
    tokens: Tokens,
    *,
    tile: int = 1,
    window: Window = None,
    soft_cap: float | None = None,
    metadata: PagedAttentionMetadata | None = None,
) -> np.ndarray:
    metadata = lay_out_tokens(tokens, tile) if metadata is None else metadata
    arguments = (tokens.query, tokens.cache, metadata, tokens.sinks)
    options: dict[str, Any] = {"window": window, "soft_cap": soft_cap}
    assert "mmjax_attention_" in walk.lower(*arguments, **options).as_text()
    return np.asarray(walk(*arguments, **options))


@jax.jit
def read(cache: Any, table: Any) -> tuple[Any, Any]:
    return cache.read_keys(table[None])[0], cache.read_values(table[None])[0]


def answer(tokens: Tokens, row: int, *, window: Window, soft_cap: float | None) -> np.ndarray:
    """Return the formula's output in float64, of what the arrays hold."""
    length = int(tokens.lengths[row])
    keys, values = (np.asarray(x, np.float64) for x in read(tokens.cache, tokens.tables[row]))
    keys = keys.transpose(1, 0, 3, 2).reshape(keys.shape[1], -1, keys.shape[2])
    values = values.transpose(1, 0, 2, 3).reshape(values.shape[1], -1, values.shape[3])
    if isinstance(window, ChunkWindow):
        first = (length - 1) // window.size * window.size
    else:
        first = 0 if window is None else max(0, length - window)
    query = (tokens.query[row] * tokens.query.shape[2] ** -0.5).astype(tokens.query.dtype)
    query = np.asarray(query, np.float64).reshape(keys.shape[0], -1, keys.shape[2])
    scores = np.einsum("kzh,ksh->kzs", query, keys[:, first:length])
    if soft_cap is not None:
        scores = np.tanh(scores / soft_cap) * soft_cap
    weights = np.exp(scores)
    total = weights.sum(2)
    if tokens.sinks is not None:
        total = total + np.exp(np.asarray(tokens.sinks, np.float64)).reshape(total.shape)
    out = np.einsum("kzs,ksv->kzv", weights, values[:, first:length]) / total[..., None]
    return out.reshape(-1, values.shape[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "name"), PAIRS)
def test_a_token_attends_as_the_formula_says(shape: str, name: str, dtype: str) -> None:
    options: dict[str, Any] = {"window": None, "soft_cap": None, **OPTIONS[name]}
    tokens = draw(SHAPES[shape], LENGTHS, dtype, has_sinks=options.pop("has_sinks", False))
    out = attend(tokens, **options)
    atol = 2e-6 if dtype == "float32" else 1e-2
    for row in range(len(LENGTHS)):
        np.testing.assert_allclose(out[row], answer(tokens, row, **options), atol=atol)


@pytest.mark.as_served
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_beside_any_others(shape: str, dtype: str) -> None:
    """Alone, in another order, and in a step that computes prompts, too."""
    tokens = draw(SHAPES[shape], LENGTHS, dtype, has_sinks=True)
    whole = attend(tokens)
    for rows in ([0], [3], [7], [6, 2], [5, 7, 1, 0]):
        np.testing.assert_array_equal(attend(take(tokens, rows)), whole[rows])
    np.testing.assert_array_equal(attend(tokens, tile=8), whole)


@pytest.mark.as_served
@pytest.mark.parametrize("heads", [Heads(4, 2, 40), Heads(3, 3, 16), Heads(8, 1, 72)])
@pytest.mark.parametrize("window", [None, 50, ChunkWindow(50)])
def test_a_prompt_has_the_bits_that_its_tokens_have_alone(heads: Heads, window: Window) -> None:
    """In tiles of 8 and of 64, and each token in a step of its own."""
    chunk = draw_causal_chunk(np.random.default_rng(0), 37, 90, heads)
    whole = attend_to_chunk(chunk, tile=64, window=window)
    np.testing.assert_array_equal(attend_to_chunk(chunk, tile=8, window=window), whole)
    for row in (0, 1, 40, 89):
        until = {name: getattr(chunk, name)[: 38 + row] for name in ("query", "key", "value")}
        alone = replace(chunk, start=37 + row, span_end=chunk.span_end[: 38 + row], **until)
        np.testing.assert_array_equal(attend_to_chunk(alone, tile=1, window=window)[0], whole[row])


def attend_to_chunk(chunk: Chunk, *, tile: int, window: Window) -> np.ndarray:
    """Return what the chunk's tokens attend to, beside no others."""
    batch = lay_out([chunk], num_tokens=4 if tile == 1 else 128, num_requests=4, tile=tile)
    arguments = (batch.query, batch.key, batch.value, batch.cache, batch.metadata)
    out, _ = jax.jit(partial(attention, scale=0.25, window=window))(*arguments)
    return np.asarray(out)[batch.rows[0]]


@pytest.mark.as_served
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_of_a_request_have_the_bits_that_they_have_alone(shape: str, dtype: str) -> None:
    """In a tile of 64, where each sees another part of the cache, and in tiles of their own."""
    tokens = draw(SHAPES[shape], (600,), dtype, has_sinks=True)
    lengths = np.asarray([*range(1, 20), *range(235, 262), *range(583, 601)])
    rows = np.zeros(len(lengths), int)
    some = take(tokens, list(rows))._replace(tables=tokens.tables, lengths=lengths)
    padded = lay_out_tokens(some, 64)._replace(
        tile_rows=jnp.arange(64, dtype=jnp.int32)[None],
        tile_request=jnp.zeros(1, jnp.int32),
        row_slot=jnp.arange(64, dtype=jnp.int32),
    )
    alone = lay_out_tokens(some, 1)._replace(tile_request=jnp.zeros(len(lengths), jnp.int32))
    for window in (None, 70):
        together = attend(some, metadata=padded, window=window)
        np.testing.assert_array_equal(attend(some, metadata=alone, window=window), together)


def test_a_tile_of_padding_gives_zeros() -> None:
    tokens = draw(SHAPES["each its own"], (40, 40), "float32", has_sinks=False)
    out = attend(tokens._replace(lengths=np.asarray([40, 0])))
    assert np.abs(out[0]).max() > 0
    np.testing.assert_array_equal(out[1], 0)


@pytest.mark.parametrize("change", [{"block_size": 512}, {"width": 1056}])
def test_what_the_kernel_has_no_room_for_is_computed_by_xla(change: dict[str, int]) -> None:
    shape = Shape(2, 2, 256, 256)._replace(**change)
    tokens = draw(shape, (40, 70), "float32", has_sinks=False)
    zeros = jax.tree.map(jnp.nan_to_num, tokens)  # XLA multiplies what is masked, too
    with pytest.raises(AssertionError, match="mmjax_attention_"):
        attend(zeros)


def test_without_kernels_xla_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_kernels", lambda: None)
    traced: Any = walk  # with the kernels, or without any: not to be met by others
    traced.clear_cache()
    tokens = draw(SHAPES["each its own"], (40,), "float32", has_sinks=False)
    with pytest.raises(AssertionError, match="mmjax_attention_"):
        attend(tokens)
    traced.clear_cache()


@pytest.mark.as_served
@pytest.mark.skipif(not has_tiles(), reason="a CPU without AMX, or without the kernels")
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1, 8, 8), (33, 47, 4, 2, 72, 40), (5, 300, 2, 1, 80, 128), (577, 577, 2, 2, 64, 64)],
    ids=str,
)
def test_tiles_attend_as_the_formula_does(sizes: tuple[int, ...], soft_cap: float | None):
    """And an item has the bits that it has alone."""
    length, num_keys, heads, kv_heads, head_dim, value_dim = sizes
    generator = np.random.default_rng(7)
    query, key, value = (
        jnp.asarray(2 * generator.normal(size=(2, *shape)), jnp.bfloat16)
        for shape in (
            (length, heads, head_dim),
            (num_keys, kv_heads, head_dim),
            (num_keys, kv_heads, value_dim),
        )
    )
    attend = jax.jit(partial(dense_attention, mask=None, scale=head_dim**-0.5, soft_cap=soft_cap))
    assert "mmjax_whole_attention" in attend.lower(query, key, value).as_text()
    out = attend(query, key, value)
    q, k, v = (np.asarray(array, np.float64) for array in (query, key, value))
    k, v = (np.repeat(array, heads // kv_heads, axis=2) for array in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * head_dim**-0.5
    scores = scores if soft_cap is None else np.tanh(scores / soft_cap) * soft_cap
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
    # Weights and outputs are rounded to 2^-9 of each.
    np.testing.assert_allclose(out, expected, rtol=2**-8, atol=2**-7 * np.abs(v).max() / 4)
    np.testing.assert_array_equal(attend(query[1:], key[1:], value[1:]), out[1:])
