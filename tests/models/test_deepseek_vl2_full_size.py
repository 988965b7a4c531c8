"""DeepSeek-VL2 at its published sizes, without weights: every tensor of a checkpoint has one place.

transformers has no class of it: names and shapes are listed here as the published code makes them,
and the list is held against the tiny checkpoints' files.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.deepseek_vl2.host_inputs import DeepseekVLV2HostInputs
from mmjax.models.deepseek_vl2.model import DeepseekVLV2ForCausalLM
from mmjax.models.host_inputs import EncoderSpec
from mmjax.models.model_source import load_model_config
from mmjax.weights.load import match_tensors
from mmjax.weights.rules import apply_rules
from mmjax.weights.safetensors import StoredTensor, open_safetensors

GOLDEN = Path(__file__).parent.parent / "golden_models"
LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "use_mla": True,
    "v_head_dim": 128,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 1280,
        "intermediate_size": 6848,
        "moe_intermediate_size": 896,
        "n_routed_experts": 64,
        "num_attention_heads": 10,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 12,
        "num_key_value_heads": 10,
        "vocab_size": 129280,
    },
    "small": {
        **LATENT,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "vocab_size": 102400,
    },
    "base": {
        **LATENT,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 72,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 30,
        "num_key_value_heads": 32,
        "vocab_size": 129280,
    },
}
"""By checkpoint, the keys of `language_config` that differ from its tiny stand-in's."""
NUM_PARAMETERS = {"tiny": 3.37e9, "small": 16.1e9, "base": 27.5e9}
TILES = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (1, 9), (9, 1), (3, 3)]


def published_config(size: str, folder: Path) -> Any:
    """Read the tiny stand-in's config.json with the published sizes in it."""
    config = json.loads((GOLDEN / f"deepseek_vl2_{size}" / "config.json").read_text())
    config["language_config"].update(PUBLISHED[size])
    width = PUBLISHED[size]["hidden_size"]
    # What the published files leave out is what the class says.
    for key in ("image_size", "patch_size", "width", "layers"):
        config["vision_config"].pop(key, None)
    config["vision_config"] |= {"layers": 27, "patch_size": 14, "width": 1152}
    config["projector_config"] = {"model_type": "mlp_projector", "n_embed": width}
    config["candidate_resolutions"] = [[384 * x, 384 * y] for x, y in TILES]
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_config(str(folder)).hf_config


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def list_tensors(text: Any, vision: dict[str, int], *, has_pool: bool) -> Shapes:
    """Yield the published names and shapes."""
    width = text.hidden_size
    yield "image_newline", (width,)
    yield "view_seperator", (width,)
    yield from list_linear("projector.layers.0", vision["width"] * 4, width)
    yield from list_linear("projector.layers.2", width, width)
    yield from list_tower(vision, has_pool=has_pool)
    yield "language.lm_head.weight", (text.vocab_size, width)
    yield "language.model.embed_tokens.weight", (text.vocab_size, width)
    yield "language.model.norm.weight", (width,)
    for number in range(text.num_hidden_layers):
        layer = f"language.model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        yield from list_attention(f"{layer}.self_attn", text)
        if number == 0:
            yield from list_mlp(f"{layer}.mlp", width, text.intermediate_size)
        else:
            yield from list_experts(f"{layer}.mlp", text)


def list_linear(name: str, inputs: int, outputs: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def list_norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def list_tower(vision: dict[str, int], *, has_pool: bool) -> Shapes:
    width, patch = vision["width"], vision["patch_size"]
    inner, num_patches = int(width * 3.7362), (vision["image_size"] // patch) ** 2
    yield "vision.patch_embed.proj.weight", (width, 3, patch, patch)
    yield "vision.patch_embed.proj.bias", (width,)
    yield "vision.pos_embed", (1, num_patches, width)
    yield from list_norm("vision.norm", width)
    for number in range(vision["layers"]):
        block = f"vision.blocks.{number}"
        yield from list_norm(f"{block}.norm1", width)
        yield from list_norm(f"{block}.norm2", width)
        yield from list_linear(f"{block}.attn.qkv", width, 3 * width)
        yield from list_linear(f"{block}.attn.proj", width, width)
        yield from list_linear(f"{block}.mlp.fc1", width, inner)
        yield from list_linear(f"{block}.mlp.fc2", inner, width)
    if has_pool:
        pool = "vision.attn_pool"
        yield f"{pool}.latent", (1, 1, width)
        yield from list_norm(f"{pool}.norm", width)
        yield from list_linear(f"{pool}.q", width, width)
        yield from list_linear(f"{pool}.kv", width, 2 * width)
        yield from list_linear(f"{pool}.proj", width, width)
        yield from list_linear(f"{pool}.mlp.fc1", width, inner)
        yield from list_linear(f"{pool}.mlp.fc2", inner, width)


def list_attention(name: str, text: Any) -> Shapes:
    width, heads = text.hidden_size, text.num_attention_heads
    if not text.use_mla:
        yield from ((f"{name}.{one}_proj.weight", (width, width)) for one in "qkvo")
        return
    nope, rope, value = text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim
    rank = text.kv_lora_rank
    yield f"{name}.q_proj.weight", (heads * (nope + rope), width)
    yield f"{name}.kv_a_proj_with_mqa.weight", (rank + rope, width)
    yield f"{name}.kv_a_layernorm.weight", (rank,)
    yield f"{name}.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{name}.o_proj.weight", (width, heads * value)


def list_mlp(name: str, width: int, inner: int) -> Shapes:
    yield f"{name}.gate_proj.weight", (inner, width)
    yield f"{name}.up_proj.weight", (inner, width)
    yield f"{name}.down_proj.weight", (width, inner)


def list_experts(name: str, text: Any) -> Shapes:
    width, inner = text.hidden_size, text.moe_intermediate_size
    yield f"{name}.gate.weight", (text.n_routed_experts, width)
    if text.topk_method == "noaux_tc":
        yield f"{name}.gate.e_score_correction_bias", (text.n_routed_experts,)
    yield from list_mlp(f"{name}.shared_experts", width, text.n_shared_experts * inner)
    for number in range(text.n_routed_experts):
        yield from list_mlp(f"{name}.experts.{number}", width, inner)


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_list_is_the_tiny_files(size: str):
    path = GOLDEN / f"deepseek_vl2_{size}"
    config = load_model_config(str(path)).hf_config
    with open_safetensors(path) as tensors:
        found = {name: tensor.shape for name, tensor in tensors.items()}
    vision = {"width": 64, "patch_size": 14, "image_size": 76, "layers": 3}
    has_pool = "vision.attn_pool.latent" in found  # left out of two files, to keep them small
    assert has_pool == (size == "tiny")
    assert found == dict(list_tensors(config.get_text_config(), vision, has_pool=has_pool))


@pytest.mark.parametrize("size", PUBLISHED)
def test_every_tensor_is_used_once_and_none_is_left_over(tmp_path: Path, size: str):
    config = published_config(size, tmp_path)
    rules = DeepseekVLV2ForCausalLM.rules(config)
    vision = {"width": 1152, "patch_size": 14, "image_size": 384, "layers": 27}
    tensors = [
        StoredTensor(name, "model.safetensors", shape, "BF16", None)
        for name, shape in list_tensors(config.get_text_config(), vision, has_pool=True)
    ]
    _, abstract = build_abstract(DeepseekVLV2ForCausalLM, config, dtype=jnp.bfloat16)
    expected = flatten_params(abstract)
    # Reports what is missing, unexpected or misshapen, and two tensors for one place.
    sources = match_tensors(tensors, expected, rules, source=size)
    assert sources.keys() == expected.keys()
    unread = {tensor.name for tensor in tensors if apply_rules(tensor.name, rules) is None}
    assert {name.rpartition("attn_pool")[0] for name in unread} == {"vision."}
    read = sum(np.prod(tensor.shape) for tensor in tensors if tensor.name not in unread)
    total = sum(int(np.prod(leaf.shape)) for leaf in expected.values())
    assert total == read
    assert total == pytest.approx(NUM_PARAMETERS[size], rel=0.01)


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_tile_and_a_step_have_their_shapes(tmp_path: Path, size: str):
    config = published_config(size, tmp_path)
    width = config.get_text_config().hidden_size
    host = DeepseekVLV2HostInputs(config)
    assert isinstance(host.encoder_spec, EncoderSpec)
    assert host.encoder_spec.tokens_per_unit == 14**2
    rows = host.embed_rows({"images_spatial_crop": np.array([3, 2])})
    assert len(rows) == 14 * 15 + 1 + 28 * 43
    graphdef, params = build_abstract(DeepseekVLV2ForCausalLM, config, dtype=jnp.bfloat16)
    pixels = jax.ShapeDtypeStruct((2, 3, 384, 384), jnp.float32)
    out = jax.eval_shape(lambda p, x: bind(graphdef, p).embed_multimodal(x), params, pixels)
    assert (out.shape, out.dtype) == ((2, 196, width), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((4, width), jnp.bfloat16)
    logits = jax.eval_shape(lambda p, x: bind(graphdef, p).compute_logits(x), params, hidden)
    assert logits.shape == (4, PUBLISHED[size]["vocab_size"])
    spec = bind(graphdef, params).kv_cache_spec
    assert len(spec.layers) == PUBLISHED[size]["num_hidden_layers"]
    # The latent and the key with a position, against keys and values of 10 heads of 128.
    layer = spec.layers[0]
    assert (layer.num_kv_heads, layer.head_dim, layer.value_dim) == (
        (10, 128, 128) if size == "tiny" else (1, 576, 512)
    )
