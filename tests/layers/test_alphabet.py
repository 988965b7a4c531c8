"""The small layers, each against torch's of the same name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers.activations import ACT2FN

from mmjax.errors import CheckpointError
from mmjax.layers.activation import get_activation
from mmjax.layers.attention.kv_cache import KVCacheSpec, TransposedCache, allocate
from mmjax.layers.attention.paged import apply_soft_cap
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.module import bind, build_abstract, flatten_params, unflatten_params
from mmjax.layers.norm import GemmaRMSNorm
from mmjax.layers.rope import (
    apply_rotary,
    attention_factor,
    inverse_frequencies,
    multimodal_angles,
    rotary_angles,
)
from mmjax.layers.tpu.rows import _read_sides, read_rows
from mmjax.layers.vision import PatchEmbedding

F32 = jnp.float32


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def apply(build: Any, params: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Run the module that `build` describes with `params`."""
    graphdef, abstract = build_abstract(build)
    assert {k: v.shape for k, v in abstract.items()} == {k: v.shape for k, v in params.items()}
    module = bind(graphdef, {name: jnp.asarray(value) for name, value in params.items()})
    return np.asarray(module(jnp.asarray(x)))


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu"])
def test_activations(name: str):
    x = draw(100) * 3
    ours = get_activation(name)(jnp.asarray(x))
    np.testing.assert_allclose(ours, ACT2FN[name](torch.tensor(x)), atol=2e-6)


def test_an_unknown_activation_is_named():
    with pytest.raises(CheckpointError, match=r"`mish` is unknown; known: gelu, "):
        get_activation("mish")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gemma_norm_rounds_once(dtype: Any):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    x, weight = draw(4, 8) * 5, draw(8, seed=1)
    graphdef, _ = build_abstract(lambda: GemmaRMSNorm(8, eps=1e-6, dtype=dtype))
    module = bind(graphdef, {"weight": jnp.asarray(weight, dtype)})
    ours = module(jnp.asarray(x, dtype)).astype(F32)
    theirs = Gemma3RMSNorm(8, eps=1e-6)
    kind = torch.float32 if dtype == jnp.float32 else torch.bfloat16
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(weight))
        expected = theirs.to(kind)(torch.tensor(x).to(kind)).float()
    np.testing.assert_allclose(ours, expected, rtol=2**-7 if dtype == jnp.bfloat16 else 2e-6)


def test_embed_reads_row_zero_outside_its_table():
    table = draw(5, 4)
    ids = np.array([4, 0, 5, 1000, -1, 2], np.int32)
    ours = apply(lambda: Embed(5, 4, dtype=F32), {"weight": table}, ids)
    np.testing.assert_array_equal(ours, table[[4, 0, 0, 0, 0, 2]])


@pytest.mark.parametrize(("num_rows", "dtype"), [(300, F32), (256, jnp.int8), (5, jnp.bfloat16)])
def test_tpus_read_rows_that_lie_side_by_side(num_rows: int, dtype: Any):
    table = jnp.asarray(draw(num_rows, 24) * 40, dtype)
    ids = jnp.asarray([0, num_rows - 1, 3, num_rows // 2, num_rows - 2], jnp.int32)
    np.testing.assert_array_equal(_read_sides(table, ids), table[ids])


@pytest.mark.parametrize(
    ("width", "num_devices", "is_loop"), [(576, 1, True), (512, 1, False), (576, 2, False)]
)
def test_a_tpu_copies_no_table_to_read_a_few_rows(width: int, num_devices: int, is_loop: bool):
    """By what libtpu compiles: of 576 inputs, it keeps the columns of a table together."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("model",))
    by_rows = NamedSharding(mesh, PartitionSpec("model")) if num_devices > 1 else None
    table = jax.ShapeDtypeStruct((1024, width), jnp.bfloat16, sharding=by_rows)
    ids = jax.ShapeDtypeStruct((16,), jnp.int32)
    traced = jax.jit(read_rows).trace(table, ids)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("stablehlo.while" in text) == is_loop
    assert ("stablehlo.gather" in text) != is_loop


def test_logits_are_float32_whatever_comes_in():
    x, weight = (jnp.asarray(value, jnp.bfloat16) for value in (draw(3, 8), draw(5, 8)))
    graphdef, _ = build_abstract(lambda: Embed(5, 8, dtype=jnp.bfloat16))
    logits = bind(graphdef, {"weight": weight}).project(x)
    assert logits.dtype == F32
    expected = np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T
    np.testing.assert_allclose(logits, expected, rtol=1e-5)


def test_soft_cap_bounds_and_keeps_small_values():
    x = jnp.asarray([-1e4, -0.01, 0.0, 0.01, 1e4], F32)
    np.testing.assert_allclose(apply_soft_cap(x, 30.0), [-30, -0.01, 0, 0.01, 30], rtol=1e-5)
    assert apply_soft_cap(x, None) is x


@pytest.mark.parametrize("size", [(12, 12), (14, 11)])
def test_patches_are_the_convolution(size: tuple[int, int]):
    pixels, weight, bias = draw(2, 3, *size), draw(7, 3, 4, 4), draw(7)
    ours = apply(
        lambda: PatchEmbedding(3, 7, 4, use_bias=True, dtype=F32),
        {"weight": weight, "bias": bias},
        pixels,
    )
    tensors = (torch.tensor(pixels), torch.tensor(weight), torch.tensor(bias))
    expected = torch.nn.functional.conv2d(*tensors, stride=4).flatten(2).transpose(1, 2)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_an_unknown_rope_type_is_named():
    with pytest.raises(CheckpointError, match="`rope_type` is `longrope`"):
        inverse_frequencies({"rope_type": "longrope", "rope_theta": 1e4}, 16)
    with pytest.raises(CheckpointError, match="`linear`, and 'factor' is not given"):
        inverse_frequencies({"rope_type": "linear", "rope_theta": 1e4}, 16)


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
        {"rope_type": "llama3", "factor": 32.0, **LLAMA3},
        {"rope_type": "yarn", "factor": 4.0, **YARN},
        {"rope_type": "yarn", "factor": 4.0, **YARN, "truncate": False, "attention_factor": 0.7},
        {"rope_type": "yarn", "factor": 8.0, **YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        {"rope_type": "yarn", "factor": 2.0, **YARN, "beta_fast": 4, "beta_slow": 2},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
    ids=lambda parameters: "-".join(str(value) for value in parameters.values()),
)
def test_rotary_kinds(parameters: dict[str, Any]):
    """Angles, and heads turned by them, against HF's Llama; by halves against its Persimmon."""
    from transformers import LlamaConfig, PersimmonConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    from transformers.models.persimmon.modeling_persimmon import PersimmonRotaryEmbedding

    parameters = {"rope_theta": 1e4, **parameters}
    is_partial = "partial_rotary_factor" in parameters
    shared: Any = {"hidden_size": 64, "num_attention_heads": 2, "rope_parameters": parameters}
    rotary = (
        PersimmonRotaryEmbedding(PersimmonConfig(**shared))
        if is_partial
        else LlamaRotaryEmbedding(LlamaConfig(max_position_embeddings=2048, **shared))
    )
    positions = np.array([0, 1, 7, 500, 2047], np.int32)
    x = draw(5, 2, 32)
    angles = rotary(torch.tensor(x), torch.tensor(positions)[None])
    width = angles[0].shape[-1]
    turned, _ = apply_rotary_pos_emb(
        *(torch.tensor(x[..., :width])[None],) * 2, *angles, unsqueeze_dim=2
    )
    ours = rotary_angles(
        jnp.asarray(positions),
        inverse_frequencies(parameters, 32),
        attention_factor(parameters),
    )
    rotated = apply_rotary(jnp.asarray(x), *ours)
    np.testing.assert_allclose(rotated[..., :width], turned[0], atol=1e-4)
    np.testing.assert_array_equal(rotated[..., width:], x[..., width:])
    assert width == (16 if is_partial else 32)


def test_multimodal_rotary():
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import (
        Qwen2VLRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    sections = [4, 6, 6]
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    config: Any = Qwen2VLConfig(
        text_config={
            "hidden_size": 64,
            "num_attention_heads": 2,
            "rope_parameters": parameters,
        }
    ).text_config
    positions = np.random.default_rng(0).integers(0, 900, (3, 5)).astype(np.int32)
    x = draw(5, 2, 32)
    angles = Qwen2VLRotaryEmbedding(config)(torch.tensor(x), torch.tensor(positions)[:, None])
    query = torch.tensor(x)[None]
    expected, _ = apply_rotary_pos_emb(query, query, *angles, unsqueeze_dim=2)
    ours = multimodal_angles(jnp.asarray(positions), inverse_frequencies(parameters, 32), sections)
    np.testing.assert_allclose(apply_rotary(jnp.asarray(x), *ours), expected[0], atol=1e-4)
    with pytest.raises(CheckpointError, match=r"`mrope_section` is .*must be 16"):
        multimodal_angles(jnp.asarray(positions), inverse_frequencies(parameters, 32), [4, 4, 4])


def test_a_block_costs_what_its_arrays_hold():
    spec = KVCacheSpec.alike(3, num_kv_heads=2, head_dim=16)
    cache = allocate(spec, num_blocks=5, block_size=8, dtype=jnp.bfloat16)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert total == 5 * 3 * (2 * 2 * 16) * 8 * 2
    assert isinstance(cache[0], TransposedCache)
    assert cache[0].block_size == 8


class _Stack(nnx.Module):
    """Two linear layers in a list."""

    def __init__(self) -> None:
        self.layers = nnx.List(Linear(2, 2, use_bias=False, dtype=F32) for _ in range(2))
        self.kind = "stack"


def test_params_are_plain_dicts_with_dotted_names():
    graphdef, abstract = build_abstract(_Stack)
    flat = flatten_params(abstract)
    assert flat.keys() == {"layers.0.weight", "layers.1.weight"}
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in flat.values())
    assert unflatten_params(flat) == abstract
    params = unflatten_params({name: draw(2, 2) for name in flat})
    assert bind(graphdef, params).kind == "stack"
