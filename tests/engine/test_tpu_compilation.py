"""libtpu compiles the programs of published widths for a TPU v5e, without one.

With its limits of every memory, and with what it allocates: a step must not copy its weights, nor
its cache. Skipped without libtpu; `pip install "jax[tpu]"` brings it, from PyPI.
"""

import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from mmjax.engine.device.compilation import Program
from mmjax.engine.device.encoder import choose_sizes
from mmjax.engine.device.functions import ModelShape
from mmjax.engine.device.mesh import Placement
from mmjax.engine.device.programs import Programs
from mmjax.engine.scheduling.buckets import Buckets
from mmjax.layers.attention.api import attention, choose_cache_type, span_variants
from mmjax.layers.attention.kv_cache import KVCacheSpec
from mmjax.layers.attention.metadata import PagedAttentionMetadata
from mmjax.layers.cpu.groups import Layout
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.module import bind, build_abstract
from mmjax.layers.moe import Experts
from mmjax.layers.quantization import INT4, PackedLinear
from tests.models.test_full_size import Checkpoint

pytestmark = pytest.mark.slow

BLOCK_SIZE, NUM_BLOCKS = 32, 1024
WIDE = (Layout(code="uint8", group_size=128), Layout(code="float8", group_size=128))


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    pytest.importorskip("libtpu")
    # Else it waits for a cloud's own server, and refuses a second process.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    from jax.experimental import topologies

    # What is compiled without its device can be kept, and not read again.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def count_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compile_for(device: Any, function: Any, /, *arguments: Any, **named: Any) -> int:
    """Return the bytes that a jitted function takes beside arguments and results."""

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device))

    # The engine's for bfloat16, unlike other tests': Mosaic refuses its kernels another.
    precision = jax.default_matmul_precision("default")
    kind = AbstractDevice(platform="tpu", device_kind=device.device_kind, num_cores=1)
    mesh = AbstractMesh((), (), abstract_device=kind)
    with precision, jax.sharding.use_abstract_mesh(mesh):
        placed = jax.tree.map(place, (arguments, named))
        traced = function.trace(*placed[0], **placed[1])
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "sinks"),
    [(28, 4, 128, False), (64, 8, 64, True), (8, 4, 256, False), (10, 10, 128, False)],
    ids=["Qwen2.5-VL, the kernel", "gpt-oss", "Gemma 3", "DeepSeek-VL2"],
)
@pytest.mark.parametrize("num_tokens", [16, 256])
def test_attention_never_copies_its_cache(
    num_heads: int, num_kv_heads: int, head_dim: int, sinks: bool, num_tokens: int, device: Any
):
    bfloat16, describe = jnp.bfloat16, jax.ShapeDtypeStruct
    spec = KVCacheSpec.alike(1, num_kv_heads=num_kv_heads, head_dim=head_dim)
    layout = choose_cache_type("tpu", spec, jnp.dtype(bfloat16))
    options = (spec.layers[0], NUM_BLOCKS, BLOCK_SIZE, bfloat16, None)
    cache = jax.eval_shape(lambda: layout.zeros(*options))
    rows = 1 if num_tokens == 16 else 64
    num_tiles = 16 + num_tokens // rows * (rows > 1)
    shapes = [(num_tokens,)] * 3 + [(num_tiles, rows), (num_tiles,), (num_tokens,), (16, 256)]
    integers = [describe(shape, jnp.int32) for shape in shapes]
    fields: list[Any] = [*integers[:3], None, *integers[3:]]
    metadata = PagedAttentionMetadata(*fields)
    query, key = (
        describe((num_tokens, heads, head_dim), bfloat16) for heads in (num_heads, num_kv_heads)
    )

    def step(cache: Any, query: Any, key: Any, value: Any, metadata: Any, sinks: Any) -> Any:
        return attention(query, key, value, cache, metadata, scale=0.1, sinks=sinks)

    given = describe((num_heads,), bfloat16) if sinks else None
    call = jax.jit(step, donate_argnums=0)
    used = compile_for(device, call, cache, query, key, key, metadata, given)
    assert used < count_bytes(cache) / 4


@pytest.mark.parametrize(
    ("num_rows", "width"), [(201_088, 2880), (49_280, 960)], ids=["gpt-oss", "SmolVLM 500M"]
)
def test_tables_are_not_copied(num_rows: int, width: int, device: Any):
    """1.1 GiB, and 90 MiB: rows are read from, and logits made of, one table."""
    graph, params = nnx.split(nnx.eval_shape(lambda: Embed(num_rows, width, dtype=jnp.bfloat16)))

    @jax.jit
    def call(params: Any, ids: Any) -> Any:
        embed = nnx.merge(graph, params)
        return embed.project(embed(ids))

    ids = jax.ShapeDtypeStruct((16,), jnp.int32)
    assert compile_for(device, call, params, ids) < 2**22


def test_experts_are_not_copied(device: Any):
    """Qwen3-VL-30B-A3B's, 1.1 GiB in each layer."""
    settings = {"activation": "silu", "dtype": jnp.bfloat16}
    experts = nnx.eval_shape(lambda: Experts(128, 2048, 768, **settings))
    graph, params = nnx.split(experts)
    rows = jax.ShapeDtypeStruct((128, 2048), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((128,), jnp.int32)
    call = jax.jit(lambda params, rows, sizes: nnx.merge(graph, params)(rows, sizes))
    assert compile_for(device, call, params, rows, sizes) < 2**24


@pytest.mark.parametrize(
    "layout",
    [INT4, Layout(code="uint4", group_size=128, has_zero=True), *WIDE],
    ids=["int4", "AWQ", "GPTQ, 8 bits", "FP8 in blocks"],
)
@pytest.mark.parametrize("num_rows", [16, 512])
def test_weights_in_groups_are_not_made_wide(layout: Layout, num_rows: int, device: Any):
    """Qwen2.5-VL 7B's, 130 MiB in bfloat16."""

    def build() -> PackedLinear:
        linear = Linear(3584, 18944, use_bias=False, dtype=jnp.bfloat16)
        return PackedLinear(linear, layout)

    graph, params = nnx.split(nnx.eval_shape(build))
    x = jax.ShapeDtypeStruct((num_rows, 3584), jnp.bfloat16)
    call = jax.jit(lambda params, x: nnx.merge(graph, params)(x))
    assert compile_for(device, call, params, x) < 2**22


def test_one_half_of_a_matrix_of_experts_in_4_bits_is_made_wide(device: Any):
    """Qwen3-VL-30B-A3B's: 192 MiB of 1.1 GiB."""

    def build() -> Experts:
        experts = Experts(128, 2048, 768, activation="silu", dtype=jnp.bfloat16)
        for name in ("gate_proj", "up_proj", "down_proj"):
            experts.pack(name, INT4)
        return experts

    graph, params = nnx.split(nnx.eval_shape(build))
    rows = jax.ShapeDtypeStruct((128, 2048), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((128,), jnp.int32)
    call = jax.jit(lambda params, rows, sizes: nnx.merge(graph, params)(rows, sizes))
    assert compile_for(device, call, params, rows, sizes) < 2**28


@pytest.fixture(scope="module")
def programs(device: Any) -> dict[str, list[Program]]:
    """Those of Qwen2.5-VL 7B's widths, with two layers, for at most 256 tokens in a step."""
    checkpoint = Checkpoint("qwen2_5_vl 7B")
    config = checkpoint.make_config()
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types = 2, text.layer_types[:2]
    config.vision_config.depth = 2
    dtype = jnp.dtype(jnp.bfloat16)
    graph, params = build_abstract(checkpoint.model_class, config, dtype=dtype)
    model = bind(graph, params)
    host_inputs = checkpoint.model_class.host_inputs(config)
    layout = choose_cache_type("tpu", model.kv_cache_spec, dtype)
    assert host_inputs.encoder_spec is not None
    buckets = Buckets.create(
        max_num_seqs=16,
        max_num_batched_tokens=256,
        encode_sizes={"encode": choose_sizes(host_inputs.encoder_spec, 256, 256)},
        span_variants=span_variants(layout, has_spans=model.sees != "past"),
        max_encoder_len=0,
        max_num_rows=16,
    )
    return Programs(
        ModelShape.of(graph, params),
        params,
        buckets=buckets,
        placement=Placement(device=device),
        host_inputs=host_inputs,
        num_encoder_rows=1024,
        block_size=BLOCK_SIZE,
        max_blocks=256,
        cache_type=layout,
    ).by_kind(NUM_BLOCKS)


@pytest.mark.parametrize("function", ["step", "encode", "sample"])
def test_programs_take_less_than_their_weights(
    function: str, programs: dict[str, list[Program]], device: Any
):
    program = programs[function][0]
    static = {name: program.arguments[name] for name in program.arguments}
    assert compile_for(device, program.jitted, **static) < 2**26
