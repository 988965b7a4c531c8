"""The TPU kernel's side: our layout through its shipped reference equals our attention in XLA.

The kernel itself runs on TPUs alone; what it is given is what is tested here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import Mesh

from mmjax.layers.attention.api import attention, choose_cache_type
from mmjax.layers.attention.kv_cache import (
    HeadSharding,
    InterleavedCache,
    KVCacheSpec,
    RowCache,
    SlotCache,
    TransposedCache,
)
from mmjax.layers.attention.metadata import ChunkWindow
from mmjax.layers.attention.tpu import (
    RaggedSizes,
    choose_sizes,
    ragged_attention,
    ragged_takes,
    to_arguments,
)
from tests.layers.ragged import (
    BLOCK_SIZE,
    MAX_BLOCKS,
    NUM_BLOCKS,
    STALE,
    Batch,
    Chunk,
    Heads,
    answer,
    by_rows,
    draw_causal_chunk,
    interleave,
    lay_out,
)

KERNELS = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"
NUM_CASES = 200
TOLERANCE = 2e-5
HEADS = (Heads(4, 2, 64), Heads(4, 1, 128), Heads(2, 2, 256), Heads(6, 2, 256))
OPTIONS: tuple[dict[str, Any], ...] = (
    {"window": None, "soft_cap": None},
    {"window": 9, "soft_cap": None},
    {"window": 40, "soft_cap": 3.0},
    {"window": None, "soft_cap": 30.0},
)

run = jax.jit(attention, static_argnames=("scale", "window", "soft_cap"))
arguments_of = jax.jit(to_arguments)


def draw_case(seed: int) -> tuple[Batch, list[Chunk], dict[str, Any]]:
    """Draw a mixed step, or one of decoding alone, and the layer's options."""
    generator = np.random.default_rng(seed)
    heads = HEADS[seed % len(HEADS)]
    is_decoding = generator.random() < 0.3
    chunks = [
        draw_causal_chunk(
            generator,
            int(generator.integers(120)) * int(generator.random() < 0.7),
            1 if is_decoding or generator.random() < 0.3 else int(generator.integers(1, 48)),
            heads,
        )
        for _ in range(int(generator.integers(1, 5)))
    ]
    shape = {"num_tokens": 4, "tile": 1} if is_decoding else {"num_tokens": 192, "tile": 64}
    batch = lay_out(chunks, **shape, num_requests=4, seed=seed)
    # Two options for each shape of heads: every pair of them is a program to compile.
    options = OPTIONS[(seed + seed // len(HEADS) % 2) % len(OPTIONS)]
    return batch, chunks, {"scale": heads.width**-0.5, **options}


def in_kernel_layout(batch: Batch) -> Batch:
    """Return the batch over a cache as the TPU has it: the same blocks, padded heads."""
    return replace(batch, cache=interleave(batch.cache))


def written(batch: Batch) -> Any:
    """Return the cache after this step's tokens."""
    return _write(batch.cache, batch.key, batch.value, batch.metadata)


@jax.jit
def _write(cache: Any, key: Any, value: Any, metadata: Any) -> Any:
    return cache.write(key, value, metadata.slot_block, metadata.slot_offset)


def over_numpy(function: Any) -> Callable[..., Any]:
    """Return the reference's own code over numpy: jax would compile each operation for each length.

    `test_the_reference_over_numpy_is_the_reference` holds it to the original.
    """

    def einsum(spec: str, *operands: np.ndarray, **_: Any) -> np.ndarray:
        return np.einsum(spec, *operands, optimize=True)

    def iota(_dtype: Any, shape: tuple[int, ...], axis: int) -> np.ndarray:
        return np.indices(shape, np.int32)[axis]

    def softmax(x: np.ndarray, axis: int) -> np.ndarray:
        weights = np.exp(x - x.max(axis, keepdims=True))
        return weights / weights.sum(axis, keepdims=True)

    names = ("concatenate", "float32", "int32", "logical_or", "repeat", "tanh", "where")
    jnp_names = {name: getattr(np, name) for name in names}
    lax, nn = SimpleNamespace(broadcasted_iota=iota), SimpleNamespace(softmax=softmax)
    places = {
        "jnp": SimpleNamespace(einsum=einsum, **jnp_names),
        "jax": SimpleNamespace(lax=lax, nn=nn),
    }
    copy = FunctionType(function.__code__, {**function.__globals__, **places})
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


reference_over_numpy = over_numpy(ref_ragged_paged_attention)


def reference(arguments: Any, *, scale: float, window: Any, soft_cap: Any) -> np.ndarray:
    """Return the rows of real tokens."""
    options = {"sm_scale": scale, "sliding_window": window, "soft_cap": soft_cap}
    return reference_over_numpy(*(np.asarray(x) for x in arguments), **options)


def by_hand(batch: Batch, chunks: list[Chunk]) -> tuple[Any, ...]:
    """Build the reference's arguments from the chunks, without our conversion."""
    heads = chunks[0].heads
    pages = np.zeros((NUM_BLOCKS, BLOCK_SIZE, 2 * heads.num_kv, heads.width), np.float32)
    for number, chunk in enumerate(chunks):
        for at in range(chunk.stop):
            block = batch.metadata.block_tables[number, at // BLOCK_SIZE]
            pages[block, at % BLOCK_SIZE, 0::2] = chunk.key[at]
            pages[block, at % BLOCK_SIZE, 1::2] = chunk.value[at]
    lengths = np.zeros(len(batch.metadata.block_tables), np.int32)
    lengths[: len(chunks)] = [chunk.stop for chunk in chunks]
    ends = np.zeros(len(lengths) + 1, np.int32)
    ends[1 : len(chunks) + 1] = np.cumsum([chunk.num_new for chunk in chunks])
    num_seqs = np.array([len(chunks)], np.int32)
    tables = jnp.asarray(batch.metadata.block_tables)
    return batch.query, jnp.asarray(pages), jnp.asarray(lengths), tables, ends, num_seqs


@pytest.mark.parametrize("first", range(0, NUM_CASES, 25))
def test_xla_and_our_arguments_are_the_reference(first: int):
    for seed in range(first, first + 25):
        batch, chunks, options = draw_case(seed)
        rows = np.concatenate(batch.rows)
        ours, _ = run(batch.query, batch.key, batch.value, batch.cache, batch.metadata, **options)
        ours = np.asarray(ours)[rows]
        expected = reference(by_hand(batch, chunks), **options)
        np.testing.assert_allclose(ours, expected, atol=TOLERANCE, err_msg=f"{seed=}")

        padded = in_kernel_layout(batch)
        arguments = arguments_of(padded.query, written(padded), padded.metadata)
        through = reference(arguments, **options)[..., : chunks[0].heads.width]
        np.testing.assert_allclose(ours, through, atol=TOLERANCE, err_msg=f"{seed=}")


@pytest.mark.parametrize("seed", [0, 3])
def test_the_reference_over_numpy_is_the_reference(seed: int):
    batch, chunks, options = draw_case(seed)
    arguments = by_hand(batch, chunks[:1])
    expected = ref_ragged_paged_attention(
        *(jnp.asarray(x) for x in arguments),
        sm_scale=options["scale"],
        sliding_window=options["window"],
        soft_cap=options["soft_cap"],
    )
    np.testing.assert_allclose(reference(arguments, **options), expected, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_xla_reads_both_layouts_alike(seed: int):
    batch, _, options = draw_case(seed)
    rows = np.concatenate(batch.rows)
    outputs = [
        run(x.query, x.key, x.value, x.cache, x.metadata, **options)[0][rows]
        for x in (batch, in_kernel_layout(batch))
    ]
    np.testing.assert_allclose(*outputs, atol=TOLERANCE)


def test_both_layouts_hold_the_same_after_a_step():
    batch, _, _ = draw_case(1)
    plain, padded = written(batch), written(in_kernel_layout(batch))
    width = plain.head_dim
    ids = jnp.arange(NUM_BLOCKS)[None]
    np.testing.assert_array_equal(plain.read_keys(ids), padded.read_keys(ids)[..., :width, :])
    np.testing.assert_array_equal(plain.read_values(ids), padded.read_values(ids)[..., :width])
    assert (np.asarray(padded.pages)[..., width:] == 0).all()
    assert (np.asarray(plain.keys) == STALE).any(), "padding was to be dropped"


def in_xla(
    q: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    *,
    sm_scale: float,
    **_: Any,
) -> Any:
    """Stand in for the kernel: its arguments, jittable, with whole tables gathered."""
    rows = jnp.arange(q.shape[0])
    seq = jnp.searchsorted(cu_q_lens, rows, side="right") - 1
    seq = jnp.minimum(seq, num_seqs[0] - 1)
    pages = kv_pages[page_indices[seq]].reshape(q.shape[0], -1, *kv_pages.shape[2:])
    group = q.shape[1] // (kv_pages.shape[2] // 2)
    key, value = (jnp.repeat(pages[:, :, start::2], group, axis=2) for start in (0, 1))
    scores = jnp.einsum("tnh,tsnh->tns", q, key) * sm_scale
    place = kv_lens[seq] - (cu_q_lens[seq + 1] - rows)
    is_visible = jnp.arange(scores.shape[-1])[None, None] <= place[:, None, None]
    weights = jax.nn.softmax(jnp.where(is_visible, scores, -1e30), axis=-1)
    return jnp.einsum("tns,tsnh->tnh", weights, value)


@pytest.mark.parametrize(
    "shape", [*(pytest.param(one, marks=pytest.mark.slow) for one in ((4, 1), (1, 4))), (2, 2)]
)
def test_on_a_mesh_each_device_has_its_heads(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    """Key-value heads over one axis, and the query heads of each over the other as well."""
    monkeypatch.setattr(f"{KERNELS}.ragged_paged_attention", in_xla)
    generator = np.random.default_rng(0)
    heads = Heads(num=8, num_kv=shape[0], width=64)
    chunks = [
        draw_causal_chunk(generator, 20, 30, heads),
        draw_causal_chunk(generator, 5, 1, heads),
    ]
    batch = lay_out(chunks, num_tokens=192, num_requests=4, tile=64)
    cache = written(in_kernel_layout(batch))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("kv", "group"))
    cut = HeadSharding(mesh=mesh, query_axes=("kv", "group"), kv_axes=("kv",))
    call = jax.jit(partial(ragged_attention, scale=0.125, window=None, soft_cap=None))
    whole = call(batch.query, cache, batch.metadata)
    parts = call(batch.query, replace(cache, sharding=cut), batch.metadata)
    np.testing.assert_allclose(whole, parts, atol=TOLERANCE)
    expected, _ = run(batch.query, batch.key, batch.value, batch.cache, batch.metadata, scale=0.125)
    rows = np.concatenate(batch.rows)
    np.testing.assert_allclose(parts[rows], np.asarray(expected)[rows], atol=TOLERANCE)
    assert (np.asarray(parts)[len(rows) :] == 0).all(), "padding"


def test_a_step_of_nothing_gives_the_kernel_one_row():
    """It starts a copy that it would otherwise never wait for."""
    batch, _, _ = draw_case(0)
    tokens, requests = batch.query.shape[0], len(batch.metadata.block_tables)
    ends: Any = np.full_like(batch.metadata.tile_rows, tokens)
    empty = batch.metadata._replace(tile_rows=ends)
    arguments = arguments_of(batch.query, interleave(batch.cache), empty)
    assert arguments.num_seqs.tolist() == [1]
    assert arguments.cu_q_lens.tolist() == [0, *[1] * requests]
    assert arguments.kv_lens[0] == 1


def test_what_the_kernel_takes():
    batch, _, _ = draw_case(0)
    takes = partial(ragged_takes, batch.query, interleave(batch.cache))
    assert takes(batch.metadata)
    assert not takes(batch.metadata._replace(span_end=batch.metadata.token_index + 1))
    long, wide = jnp.zeros((64, 2049), jnp.int32), jnp.zeros((2048, 16), jnp.int32)
    assert not takes(batch.metadata._replace(block_tables=long)), "1 MiB of scalars"
    assert not takes(batch.metadata._replace(block_tables=wide)), "as wide as one of 128 blocks"


@pytest.mark.parametrize(("size", "is_kernels"), [(40, False), (MAX_BLOCKS * BLOCK_SIZE, True)])
def test_chunks_are_xlas_unless_no_sequence_is_longer_than_one(size: int, is_kernels: bool):
    batch, chunks, options = draw_case(1)
    options |= {"window": ChunkWindow(size)}
    padded = in_kernel_layout(batch)
    call = partial(attention, **options)
    arguments = (padded.query, padded.key, padded.value, padded.cache, padded.metadata)
    assert ("ragged_paged_attention" in str(jax.make_jaxpr(call)(*arguments))) == is_kernels
    out, _ = jax.jit(call)(*arguments)
    for chunk, rows in zip(chunks, batch.rows, strict=True):
        np.testing.assert_allclose(np.asarray(out)[rows], answer(chunk, **options), atol=TOLERANCE)


def describe_layer(
    num_heads: int, num_kv_heads: int, block_size: int, dtype: Any
) -> tuple[jax.ShapeDtypeStruct, InterleavedCache]:
    """Return the queries of 2,048 tokens, and the layer's cache."""
    query = jax.ShapeDtypeStruct((2048, num_heads, 128), dtype)
    pages = jax.ShapeDtypeStruct((64, block_size, 2 * num_kv_heads, 128), dtype)
    return query, InterleavedCache(pages, 128)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "block_size", "dtype", "expected"),
    [
        (32, 8, 32, jnp.bfloat16, RaggedSizes(16, 32)),
        (28, 4, 32, jnp.bfloat16, RaggedSizes(16, 32)),
        (7, 1, 128, jnp.bfloat16, RaggedSizes(4, 32)),
        (64, 8, 512, jnp.bfloat16, RaggedSizes(1, 32)),
        (128, 8, 32, jnp.bfloat16, RaggedSizes(16, 16)),
        (32, 8, 1, jnp.bfloat16, RaggedSizes(128, 32)),
        (64, 8, 32, jnp.float32, RaggedSizes(16, 32)),
    ],
)
def test_what_the_kernel_computes_at_once_fits_into_a_tpu(
    num_heads: int, num_kv_heads: int, block_size: int, dtype: Any, expected: RaggedSizes
):
    """In 16 MiB: libtpu 0.0.42 compiled each for TPU v5e, and none with the kernel's own sizes."""
    assert (
        choose_sizes(*describe_layer(num_heads, num_kv_heads, block_size, dtype), 256) == expected
    )


def test_heads_that_the_kernel_cannot_cut_and_blocks_that_do_not_fit_are_not_taken():
    batch, _, _ = draw_case(0)
    metadata = batch.metadata
    assert ragged_takes(*describe_layer(32, 32, 32, jnp.bfloat16), metadata)
    assert not ragged_takes(*describe_layer(32, 32, 32, jnp.float32), metadata), "4 heads at once"
    assert ragged_takes(*describe_layer(32, 8, 512, jnp.bfloat16), metadata)
    assert not ragged_takes(*describe_layer(32, 8, 1024, jnp.bfloat16), metadata)


@pytest.mark.parametrize(
    ("platform", "num_kv_heads", "dtype", "expected"),
    [
        ("cpu", 2, "float32", TransposedCache),
        ("gpu", 2, "bfloat16", SlotCache),
        ("cuda", 3, "float32", SlotCache),
        ("tpu", 2, "float32", InterleavedCache),
        ("tpu", 1, "bfloat16", InterleavedCache),
        ("tpu", 8, "bfloat16", InterleavedCache),
        ("tpu", 3, "bfloat16", RowCache),
        ("tpu", 2, "float16", RowCache),
    ],
)
def test_the_layout_is_the_platforms(platform: str, num_kv_heads: int, dtype: str, expected: type):
    spec = KVCacheSpec.alike(1, num_kv_heads=num_kv_heads, head_dim=64)
    assert choose_cache_type(platform, spec, jnp.dtype(dtype)) is expected


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    [(96, InterleavedCache), (128, InterleavedCache), (256, RowCache)],
)
def test_heads_wider_than_a_register_are_not_the_tpu_kernels(head_dim: int, expected: type):
    """Gemma's 256: Mosaic compiles no loads of every other row of them."""
    spec = KVCacheSpec.alike(1, num_kv_heads=4, head_dim=head_dim)
    assert choose_cache_type("tpu", spec, jnp.dtype(jnp.bfloat16)) is expected


@pytest.mark.parametrize("num_devices", [1, 4])
def test_rows_of_other_heads_are_padded_for_each_device(num_devices: int):
    """To rows of 128 numbers, without which XLA for TPU lays out whole caches anew in each step."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("model",))
    sharding = HeadSharding(mesh=mesh, query_axes=("model",), kv_axes=("model",))
    draw = np.random.default_rng(0).normal
    keys, values = (
        jnp.asarray(draw(size=(5, 4, *last)), jnp.float32) for last in [(24, 16), (16, 20)]
    )
    transposed = TransposedCache(keys, values)
    cache = by_rows(transposed, sharding)
    assert cache.keys.shape == cache.values.shape == (5, 16, num_devices, 128)
    ids = jnp.array([[3, 0], [4, 3]], jnp.int32)
    np.testing.assert_array_equal(cache.read_keys(ids), transposed.keys[ids])
    np.testing.assert_array_equal(cache.read_values(ids), transposed.values[ids])


def test_padded_heads_are_counted():
    layer = KVCacheSpec.alike(1, num_kv_heads=2, head_dim=72).layers[0]
    cache = InterleavedCache.zeros(layer, 5, 16, jnp.float32, None)
    assert cache.pages.shape == (5, 16, 4, 128)
    assert (cache.num_kv_heads, cache.block_size) == (2, 16)


@pytest.mark.parametrize("name", ["read_keys", "read_values"])
def test_whole_rows_of_padded_heads_are_read(name: str):
    """To cut or pick them where they lie, XLA for TPU copies the whole cache (libtpu 0.0.42)."""
    layer = KVCacheSpec.alike(1, num_kv_heads=2, head_dim=64).layers[0]
    cache = InterleavedCache.zeros(layer, 5, 16, jnp.float32, None)
    jaxpr = jax.make_jaxpr(getattr(cache, name))(np.zeros((3, 2), np.int32)).jaxpr
    sizes = [
        equation.params["slice_sizes"]
        for equation in jaxpr.eqns
        if equation.primitive.name == "gather"
    ]
    assert sizes == [(1, 16 * 2 * 2, 128)]
