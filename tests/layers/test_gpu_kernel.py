"""The kernel for CUDA is our attention in XLA, whatever is masked; interpreted without a GPU."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mmjax.layers.attention import backend, gpu_tiles
from mmjax.layers.attention.gpu import MAX_SPLITS, choose_num_splits, gpu_attention
from mmjax.layers.attention.gpu_tiles import choose_sizes, column_parts
from mmjax.layers.attention.kv_cache import HeadSharding, TransposedCache
from mmjax.layers.attention.metadata import ChunkWindow, Window
from mmjax.layers.attention.paged import visible_range, walk_blocks
from tests.layers.ragged import (
    BLOCK_SIZE,
    Batch,
    Chunk,
    Heads,
    answer,
    by_slots,
    draw_causal_chunk,
    draw_chunk,
    lay_out,
)

NUM_CASES = 200
TOLERANCE = {"float32": 2e-6, "bfloat16": 3e-2}
SHAPES: dict[str, dict[str, int]] = {
    "mixed": {"num_tokens": 96, "num_requests": 4, "tile": 32},
    "decode": {"num_tokens": 4, "num_requests": 4, "tile": 1},
}


class Kind(NamedTuple):
    """What a program is compiled for."""

    shape: str
    heads: Heads = Heads()
    value_dim: int = Heads().width
    soft_cap: float | None = None
    dtype: str = "float32"
    has_sinks: bool = False


KINDS = [
    Kind("mixed"),
    Kind("decode"),
    Kind("mixed", Heads(3, 1, 24), 20, soft_cap=3.0),
    Kind("decode", Heads(3, 1, 24), 16, dtype="bfloat16"),
    Kind("mixed", has_sinks=True),
    Kind("decode", Heads(3, 1, 24), 24, has_sinks=True),
]
WINDOWS = (None, 9, 40, ChunkWindow(16))
WIDTHS = [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (72, 40), (192, 128), (576, 512)]
"""Of keys and values."""


def draw_chunks(generator: np.random.Generator, shape: str, heads: Heads) -> list[Chunk]:
    """Draw up to four chunks; some with images if the heads are those of `draw_chunk`."""
    chunks = []
    for _ in range(int(generator.integers(1, 5))):
        start = int(generator.integers(120)) * int(generator.random() < 0.7)
        num_new = 1 if shape == "decode" or generator.random() < 0.3 else 0
        num_new = num_new or int(generator.integers(1, 24))
        if heads == Heads() and generator.random() < 0.8:
            chunks.append(draw_chunk(generator, start, num_new))
        else:
            chunks.append(draw_causal_chunk(generator, start, num_new, heads))
    return chunks


def to_device(batch: Batch, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """Return the query, the cache after the step's tokens, and the metadata."""
    query, key, value = (jnp.asarray(x, dtype) for x in (batch.query, batch.key, batch.value))
    cache = jax.tree.map(lambda x: x.astype(dtype), by_slots(batch.cache))
    metadata = jax.tree.map(jnp.asarray, batch.metadata)
    return query, _write(cache, key, value, metadata), metadata


@jax.jit
def _write(cache: Any, key: Any, value: Any, metadata: Any) -> Any:
    return cache.write(key, value, metadata.slot_block, metadata.slot_offset)


walk = jax.jit(walk_blocks, static_argnames=("scale", "soft_cap"))
IS_INTERPRETED = jax.default_backend() != "gpu"
kernel = jax.jit(
    partial(gpu_attention, interpret=IS_INTERPRETED), static_argnames=("scale", "soft_cap")
)


def compare(batch: Batch, *, window: Window, dtype: str = "float32", **options: Any) -> None:
    """Compare the kernel with the walk over the same blocks; padding must be zeros."""
    query, cache, metadata = to_device(batch, jnp.dtype(dtype))
    visible = visible_range(metadata, window)
    arguments = (query, cache, metadata, metadata.block_tables, visible)
    ours, expected = (np.asarray(f(*arguments, **options), np.float32) for f in (kernel, walk))
    rows = np.concatenate(batch.rows)
    np.testing.assert_allclose(ours[rows], expected[rows], atol=TOLERANCE[dtype])
    np.testing.assert_array_equal(np.delete(ours, rows, axis=0), 0)


def draw_case(seed: int) -> tuple[Kind, Batch, list[Chunk], dict[str, Any]]:
    generator = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    chunks = draw_chunks(generator, kind.shape, kind.heads)
    batch = narrow(lay_out(chunks, **SHAPES[kind.shape], seed=seed), kind.value_dim)
    window = WINDOWS[int(generator.integers(len(WINDOWS)))]
    sinks = generator.normal(size=kind.heads.num).astype(np.float32) if kind.has_sinks else None
    options = {"scale": 0.25, "window": window, "soft_cap": kind.soft_cap, "sinks": sinks}
    return kind, batch, chunks, options


def narrow(batch: Batch, value_dim: int) -> Batch:
    """Return the batch with the first columns of each value alone."""
    assert isinstance(batch.cache, TransposedCache)
    cache = batch.cache._replace(values=batch.cache.values[..., :value_dim])
    return replace(batch, cache=cache, value=batch.value[..., :value_dim])


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_it_is_the_walk(number: int):
    for seed in range(number, NUM_CASES, len(KINDS)):
        kind, batch, _, options = draw_case(seed)
        compare(batch, dtype=kind.dtype, **options)


@pytest.mark.parametrize("seed", range(2 * len(KINDS)))
def test_it_is_the_formula(seed: int):
    kind, batch, chunks, options = draw_case(seed)
    query, cache, metadata = to_device(batch, jnp.dtype(kind.dtype))
    visible = visible_range(metadata, options["window"])
    settings = {name: options[name] for name in ("scale", "soft_cap", "sinks")}
    out = kernel(query, cache, metadata, metadata.block_tables, visible, **settings)
    out = np.asarray(out, np.float32)
    for chunk, rows in zip(chunks, batch.rows, strict=True):
        expected = answer(chunk, **options)[..., : kind.value_dim]
        np.testing.assert_allclose(out[rows], expected, atol=TOLERANCE[kind.dtype])


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("block_size", [16, 32, 24])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_width_and_block_size(
    shape: str,
    dtype: str,
    block_size: int,
    width: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("tests.layers.ragged.BLOCK_SIZE", block_size)
    key_dim, value_dim = width
    heads = Heads(4, 2, key_dim)
    for seed in range(3):
        chunks = draw_chunks(np.random.default_rng(seed), shape, heads)
        batch = narrow(lay_out(chunks, **SHAPES[shape], seed=seed), value_dim)
        options = {"scale": key_dim**-0.5, "soft_cap": None}
        compare(batch, window=WINDOWS[seed], dtype=dtype, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_is_given_no_zeros_to_write_into(shape: str):
    """XLA made them of all layers at once: gigabytes beside a long prompt."""
    chunks = [draw_causal_chunk(np.random.default_rng(0), start, 1, Heads()) for start in (90, 3)]
    query, cache, metadata = to_device(lay_out(chunks, **SHAPES[shape]))
    arguments = (query, cache, metadata, metadata.block_tables, visible_range(metadata, None))
    attend = partial(gpu_attention, scale=0.25, soft_cap=None, interpret=True)
    assert "input_output_aliases=()" in str(jax.make_jaxpr(attend)(*arguments))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_nobody_sees_is_not_read(shape: str):
    """Blocks before the window, and slots behind the last token: NaN would show it."""
    chunks = [draw_causal_chunk(np.random.default_rng(0), start, 1, Heads()) for start in (90, 3)]
    batch = lay_out(chunks, **SHAPES[shape])
    query, cache, metadata = to_device(batch)
    visible = visible_range(metadata, 9)
    arguments = (metadata, metadata.block_tables, visible)
    expected = kernel(query, cache, *arguments, scale=0.25, soft_cap=None)
    seen = np.zeros(cache.keys.shape[:2], bool)
    for table, chunk in zip(batch.metadata.block_tables, chunks, strict=False):
        index = np.arange(max(chunk.stop - 9, 0), chunk.stop)
        seen[table[index // BLOCK_SIZE], index % BLOCK_SIZE] = True
    poisoned = jax.tree.map(lambda x: jnp.where(seen[..., None, None], x, jnp.nan), cache)
    out = kernel(query, poisoned, *arguments, scale=0.25, soft_cap=None)
    np.testing.assert_array_equal(out, expected)
    assert np.isfinite(np.asarray(expected)).all()


def test_neighbours_change_no_bit():
    first, *others = (draw_chunk(np.random.default_rng(seed), 50, 9) for seed in range(3))
    outputs = []
    for chunks in ([first], [*others, first]):
        batch = lay_out(chunks, **SHAPES["mixed"], seed=len(chunks))
        query, cache, metadata = to_device(batch)
        visible = visible_range(metadata, None)
        arguments = (query, cache, metadata, metadata.block_tables, visible)
        out = kernel(*arguments, scale=0.25, soft_cap=None)
        outputs.append(np.asarray(out)[batch.rows[-1]])
    np.testing.assert_array_equal(*outputs)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), pytest.param((1, 4), marks=pytest.mark.slow)])
def test_on_a_mesh_each_device_has_its_heads(shape: tuple[int, int], has_sinks: bool):
    """Key-value heads over one axis, and the query heads of each over the other as well."""
    heads = Heads(num=8, num_kv=shape[0], width=16)
    chunks = [draw_causal_chunk(np.random.default_rng(0), start, 5, heads) for start in (20, 0)]
    query, cache, metadata = to_device(lay_out(chunks, **SHAPES["mixed"]))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("kv", "group"))
    cut = HeadSharding(mesh=mesh, query_axes=("kv", "group"), kv_axes=("kv",))
    arguments = (metadata, metadata.block_tables, visible_range(metadata, None))
    options: dict[str, Any] = {"scale": 0.25, "soft_cap": None}
    options["sinks"] = jnp.linspace(-2.0, 3.0, 8) if has_sinks else None
    whole = walk(query, cache, *arguments, **options)
    parts = kernel(query, replace(cache, sharding=cut), *arguments, **options)
    rows = np.asarray(metadata.slot_block) < cache.keys.shape[0]
    np.testing.assert_allclose(parts[rows], whole[rows], atol=2e-6)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (8, [(0, 16)]),
        (64, [(0, 64)]),
        (72, [(0, 64), (64, 16)]),
        (80, [(0, 64), (64, 16)]),
        (96, [(0, 64), (64, 32)]),
        (576, [(0, 512), (512, 64)]),
    ],
)
def test_columns_are_two_powers_of_two(width: int, expected: list[tuple[int, int]]):
    assert column_parts(width) == expected


@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        *((width, "bfloat16") for width in (8, 64, 72, 128, 256, 576)),
        *((width, "float32") for width in (8, 96, 256, 288)),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 7, 64, 448])
@pytest.mark.parametrize(("memory", "num_loaded"), [(227, 3), (163, 2), (99, 2)])
def test_tiles_fit_into_shared_memory(
    memory: int,
    num_loaded: int,
    num_rows: int,
    width: int,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """Of an H100, an A100, and the smaller GPUs."""
    monkeypatch.setattr(gpu_tiles, "gpu_attribute", lambda name, of_hopper: memory * 2**10)
    sizes = choose_sizes(num_rows, width, dtype)
    for size in (sizes.num_rows, sizes.num_keys):
        assert size >= 16
        assert size.bit_count() == 1
    stored = sum(size for _, size in column_parts(width)) * jnp.dtype(dtype).itemsize
    rest = 5 * 2**10  # what Triton needs to exchange numbers between threads
    assert (sizes.num_rows + 2 * num_loaded * sizes.num_keys) * stored + rest <= memory * 2**10


@pytest.mark.parametrize(
    ("num_rows", "width", "expected"),
    [
        (4, 128, (16, 32, 8)),
        (256, 64, (32, 32, 8)),
        (256, 128, (32, 32, 8)),
        (256, 256, (32, 16, 8)),
    ],
)
def test_tiles_in_float32_are_small_since_no_tensor_core_multiplies_exactly(
    num_rows: int, width: int, expected: tuple[int, int, int]
):
    """With 64 rows of 64 columns in 4 warps ptxas writes 16,508 bytes of each thread to memory."""
    assert choose_sizes(num_rows, width, "float32") == expected


def test_few_programs_share_keys():
    assert choose_num_splits(8, 1000) == MAX_SPLITS
    assert choose_num_splits(8, 5) == 5
    assert choose_num_splits(128, 1000) == 4
    assert choose_num_splits(2000, 1000) == 1


@pytest.mark.parametrize(
    ("capability", "head_dim", "expected"),
    [
        ("7.5", 64, "xla"),
        ("8.0", 128, "cudnn"),
        ("8.9", 256, "xla"),
        ("9.0", 256, "cudnn"),
        ("12.0", 64, "cudnn"),
    ],
)
def test_towers_go_through_cudnn_from_ampere_on(
    capability: str, head_dim: int, expected: str, monkeypatch: pytest.MonkeyPatch
):
    """On a T4 cuDNN has no such attention, and refuses the whole program."""
    monkeypatch.setattr(backend, "find_spec", lambda name: name)
    gpu = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr("jax.local_devices", lambda: [gpu])
    monkeypatch.setattr(backend, "_cudnn_max_head_dim", backend._cudnn_max_head_dim.__wrapped__)
    shape = {"num_kv_heads": 16, "head_dim": head_dim, "dtype": jnp.dtype(jnp.bfloat16)}
    assert backend.choose_backend("cuda", is_paged=False, **shape) == expected
