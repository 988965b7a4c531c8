"""Random ragged batches for paged attention, laid out by hand, and the answer in float64.

Built apart from the engine's own layout, so that neither checks itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mmjax.layers.attention.api import PagedAttentionMetadata
from mmjax.layers.attention.kv_cache import (
    HeadSharding,
    InterleavedCache,
    LayerCache,
    LayerKVSpec,
    RowCache,
    SlotCache,
    TransposedCache,
    padded_head_dim,
)
from mmjax.layers.attention.metadata import ChunkWindow, Window

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 8, 128, 24
STALE = 7e3
"""What unused slots hold: great, and finite as a reused block is."""


class Heads(NamedTuple):
    """Shape of a layer's attention."""

    num: int = NUM_HEADS
    num_kv: int = NUM_KV_HEADS
    width: int = HEAD_DIM


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A request's part of a step: its tokens start .. len(span_end) after a context."""

    start: int
    span_end: np.ndarray
    """int[stop]: of all tokens from 0 on."""
    query: np.ndarray
    """[stop, N, H]"""
    key: np.ndarray
    value: np.ndarray

    @property
    def stop(self) -> int:
        return len(self.span_end)

    @property
    def num_new(self) -> int:
        return self.stop - self.start

    @property
    def heads(self) -> Heads:
        return Heads(self.query.shape[1], self.key.shape[1], self.key.shape[2])

    @property
    def is_causal(self) -> bool:
        return bool((self.span_end == np.arange(1, self.stop + 1)).all())

    @property
    def num_blocks(self) -> int:
        return -(-self.stop // BLOCK_SIZE)


def draw_chunk(generator: np.random.Generator, start: int, num_new: int) -> Chunk:
    """Draw a chunk with random image spans, each wholly in the context or wholly in the chunk."""
    stop = start + num_new
    ends = np.arange(1, stop + 1)
    for low, high in ((0, start), (start, stop)):
        at = low
        while high - at > 3 and generator.random() < 0.7:
            first = int(generator.integers(at, high - 2))
            last = int(generator.integers(first + 2, min(high, first + 20) + 1))
            ends[first:last] = last
            at = last + 1
    return _fill(generator, start, ends, Heads())


def draw_causal_chunk(
    generator: np.random.Generator, start: int, num_new: int, heads: Heads
) -> Chunk:
    """Draw a chunk of text alone."""
    return _fill(generator, start, np.arange(1, start + num_new + 1), heads)


def draw_answer_chunk(
    generator: np.random.Generator, prompt: int, start: int, num_new: int, heads: Heads
) -> Chunk:
    """Draw a chunk of a prompt and its answer, for windows that keep the prompt."""
    ends = np.minimum(np.arange(1, start + num_new + 1), prompt)
    return _fill(generator, start, ends, heads)


def _fill(generator: np.random.Generator, start: int, ends: np.ndarray, heads: Heads) -> Chunk:
    shape = (len(ends), heads.num, heads.width)
    kv_shape = (len(ends), heads.num_kv, heads.width)
    query, key, value = (
        generator.normal(size=size).astype(np.float32) for size in (shape, kv_shape, kv_shape)
    )
    return Chunk(start=start, span_end=ends, query=query, key=key, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arguments of `attention`, and the rows of T that each chunk got."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    cache: LayerCache
    metadata: PagedAttentionMetadata
    rows: list[np.ndarray]


def write_context(chunk: Chunk, blocks: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    """Store what earlier steps computed."""
    for at in range(chunk.start):
        block, offset = blocks[at // BLOCK_SIZE], at % BLOCK_SIZE
        keys[block, :, :, offset], values[block, :, offset] = chunk.key[at], chunk.value[at]


def _stale_blocks(heads: Heads) -> tuple[np.ndarray, np.ndarray]:
    keys = np.full((NUM_BLOCKS, heads.num_kv, heads.width, BLOCK_SIZE), STALE, np.float32)
    values = np.full((NUM_BLOCKS, heads.num_kv, BLOCK_SIZE, heads.width), STALE, np.float32)
    return keys, values


def lay_out(
    chunks: Sequence[Chunk], *, num_tokens: int, num_requests: int, tile: int, seed: int = 0
) -> Batch:
    """Put chunks into a bucket of `num_tokens` rows and `num_requests` requests.

    Where no chunk holds an image, the metadata has no spans.
    """
    generator = np.random.default_rng(seed)
    heads = chunks[0].heads
    num_tiles = num_requests if tile == 1 else num_tokens // tile + num_requests
    free = list(generator.permutation(NUM_BLOCKS))
    keys, values = _stale_blocks(heads)
    inputs = [
        np.full((num_tokens, count, heads.width), STALE, np.float32)
        for count in (heads.num, heads.num_kv, heads.num_kv)
    ]
    fields = {name: np.zeros(num_tokens, np.int32) for name in ("offset", "index", "end", "slot")}
    slot_block = np.full(num_tokens, NUM_BLOCKS, np.int32)
    tile_rows = np.full((num_tiles, tile), num_tokens, np.int32)
    tile_request = np.zeros(num_tiles, np.int32)
    tables = np.zeros((num_requests, MAX_BLOCKS), np.int32)
    rows, row, tile_at = [], 0, 0
    for number, chunk in enumerate(chunks):
        blocks = np.array([free.pop() for _ in range(chunk.num_blocks)], np.int32)
        tables[number, : chunk.num_blocks] = blocks
        write_context(chunk, blocks, keys, values)
        mine = np.arange(row, row + chunk.num_new)
        places = np.arange(chunk.start, chunk.stop)
        slot_block[mine] = blocks[places // BLOCK_SIZE]
        fields["offset"][mine] = places % BLOCK_SIZE
        fields["index"][mine] = places
        fields["end"][mine] = chunk.span_end[places]
        for array, source in zip(inputs, (chunk.query, chunk.key, chunk.value), strict=True):
            array[mine] = source[chunk.start :]
        for first in range(0, chunk.num_new, tile):
            part = mine[first : first + tile]
            tile_rows[tile_at, : len(part)] = part
            tile_request[tile_at] = number
            fields["slot"][part] = tile_at * tile + np.arange(len(part))
            tile_at += 1
        rows.append(mine)
        row += chunk.num_new
    metadata: dict[str, Any] = {
        "slot_block": slot_block,
        "slot_offset": fields["offset"],
        "token_index": fields["index"],
        "span_end": None if all(chunk.is_causal for chunk in chunks) else fields["end"],
        "tile_rows": tile_rows,
        "tile_request": tile_request,
        "row_slot": fields["slot"],
        "block_tables": tables,
    }
    query, key, value = inputs
    cache: Any = (keys, values)
    return Batch(
        query=query,
        key=key,
        value=value,
        cache=TransposedCache(*cache),
        metadata=PagedAttentionMetadata(**metadata),
        rows=rows,
    )


def interleave(cache: Any) -> InterleavedCache:
    """Return a transposed cache's blocks as the TPU kernel has them."""
    keys, values = np.asarray(cache.keys).transpose(0, 3, 1, 2), np.asarray(cache.values)
    both = np.stack([keys, values.transpose(0, 2, 1, 3)], axis=3)  # M Q K 2 H
    both = both.reshape(*both.shape[:2], -1, both.shape[-1])
    missing = padded_head_dim(both.shape[-1]) - both.shape[-1]
    pages = jnp.asarray(np.pad(both, ((0, 0),) * 3 + ((0, missing),)))
    return InterleavedCache(pages, cache.values.shape[-1])


def by_slots(cache: Any) -> SlotCache:
    """Return a transposed cache's blocks as the kernel for CUDA has them."""
    keys, values = np.asarray(cache.keys).transpose(0, 3, 1, 2), np.asarray(cache.values)
    return SlotCache(jnp.asarray(keys), jnp.asarray(values.transpose(0, 2, 1, 3)))


def by_rows(cache: Any, sharding: HeadSharding | None = None) -> RowCache:
    """Return a transposed cache's blocks as XLA for TPU has them."""
    num_blocks, heads, head_dim, block_size = cache.keys.shape
    layer = LayerKVSpec(num_kv_heads=heads, head_dim=head_dim, value_dim=cache.values.shape[3])
    empty = RowCache.zeros(layer, num_blocks, block_size, cache.keys.dtype, sharding)
    slots = jnp.arange(num_blocks * block_size, dtype=jnp.int32)
    keys, values = (
        jnp.asarray(x).reshape(len(slots), heads, -1)
        for x in (cache.keys.transpose(0, 3, 1, 2), cache.values.transpose(0, 2, 1, 3))
    )
    return empty.write(keys, values, slots // block_size, slots % block_size)


def visible(chunk: Chunk, window: Window, *, keeps_reference: bool = False) -> np.ndarray:
    """Return bool[num_new, stop]: which keys each new token sees."""
    i = np.arange(chunk.start, chunk.stop)[:, None]
    j = np.arange(chunk.stop)[None]
    if keeps_reference and window is not None:
        return (j <= i) & ((j > i - window) | (j < chunk.span_end[chunk.start :, None]))
    mask = j < np.maximum(i + 1, chunk.span_end[chunk.start :, None])
    if isinstance(window, ChunkWindow):
        return mask & (j // window.size >= i // window.size)
    return mask if window is None else mask & (j > i - window)


def answer(
    chunk: Chunk,
    *,
    scale: float,
    window: Window = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    keeps_reference: bool = False,
) -> np.ndarray:
    """Return [num_new, N, H] by the formula, in float64."""
    group = chunk.heads.num // chunk.heads.num_kv
    query = chunk.query[chunk.start :].astype(np.float64)
    key, value = (np.repeat(x.astype(np.float64), group, 1) for x in (chunk.key, chunk.value))
    scores = np.einsum("tnh,snh->nts", query, key) * scale
    if soft_cap is not None:
        scores = np.tanh(scores / soft_cap) * soft_cap
    mask = visible(chunk, window, keeps_reference=keeps_reference)
    scores = np.where(mask[None], scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("nts,snh->tnh", weights[..., : chunk.stop], value)
