"""Gemma 3's arrays against HF's, live: block by block, for every key of the config that matters."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from transformers import AutoConfig

from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind, build_abstract
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.models.host_inputs import EncoderSpec
from mmjax.parity.arrays import PagedModel
from mmjax.parity.reference import generate_reference, run_reference
from mmjax.weights.load import load_params
from mmjax.weights.safetensors import open_safetensors
from tests.kit import tiny_gemma3_checkpoint
from tests.oracle import (
    TOLERANCE,
    assert_close,
    draw_sample,
    paged_gemma3,
    random_gemma3,
    torch_inputs,
)

RULES = Gemma3ForConditionalGeneration.rules(None)

SHORT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window inside a picture": {
        "text": {"sliding_window": 3},
        "tokens_per_image": 16,
    },
    "head of its own": {"is_tied": False},
    "biases and linear rope": {"text": {"attention_bias": True, "rope_parameters": LINEAR}},
    "patches that fill no pool": {"vision": {"image_size": 75}},
    "wide heads": {"text": {"head_dim": 24, "num_attention_heads": 2, "num_key_value_heads": 2}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_states_logits_and_tokens_are_hfs(name: str):
    settings = CONFIGS[name]
    settings = {**settings, "text": {**SHORT, **settings.get("text", {})}}
    reference = random_gemma3(**settings)
    sample = draw_sample(reference.config, (20, 1, 17))
    expected = run_reference(reference, torch_inputs(sample), RULES)
    # the tower: embeddings, 2 blocks, norm; the projector and its norm; 3 blocks, norm, logits
    assert len(expected) >= 4 + 1 + 5

    ours = paged_gemma3(reference)
    assert_close(ours.run(sample), expected)
    tokens = generate_reference(reference, torch_inputs(sample), 32)
    assert ours.generate(sample, 32) == tokens


@pytest.mark.parametrize("window", [3, 16])
def test_dense_attention_is_hfs_too(window: int):
    reference = random_gemma3(text={**SHORT, "sliding_window": window}, tokens_per_image=16)
    sample = draw_sample(reference.config, (9, 3, 17))
    expected = run_reference(reference, torch_inputs(sample), RULES)["logits"]
    ours = paged_gemma3(reference)
    places = np.arange(sample.num_tokens, dtype=np.int32)
    mask = places[None] < sample.span_end(is_bidirectional=True)[:, None]

    @jax.jit
    def run(params: Any, token_ids: Any, pixels: Any, is_embed: Any, mask: Any) -> Any:
        model = bind(ours.graphdef, params)
        rows = model.embed_multimodal(pixels).reshape(-1, 32)
        source = jnp.maximum(jnp.cumsum(is_embed) - 1, 0)
        hidden = jnp.where(is_embed[:, None], rows[source], model.embed_input_ids(token_ids))
        index = jnp.arange(len(token_ids), dtype=jnp.int32)
        metadata = DenseAttentionMetadata(index[None], mask[None])
        hidden, _ = model(hidden, jnp.stack([index] * 3), None, metadata)
        return model.compute_logits(hidden)

    pixels = np.concatenate([item.tensors["pixel_values"] for item in sample.items])
    logits = run(ours.params, sample.token_ids, pixels, sample.is_embed, mask)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE)


def test_final_logits_are_capped_where_the_config_says_so():
    # NOTE: HF caps in its text-only class and forgets to in this one: the formula is the oracle.
    reference = random_gemma3(text={**SHORT, "final_logit_softcapping": 1.5})
    sample = draw_sample(reference.config, (30,))
    plain = run_reference(reference, torch_inputs(sample), RULES)["logits"]
    ours = paged_gemma3(reference).run(sample)["logits"]
    np.testing.assert_allclose(ours, np.tanh(plain / 1.5) * 1.5, atol=TOLERANCE)


@pytest.mark.parametrize("layout", ["hub", "save_pretrained"])
@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
def test_every_layout_of_a_directory_loads_to_the_same(
    tmp_path: Path, layout: Any, max_shard_size: str
):
    path = tiny_gemma3_checkpoint(
        tmp_path, text=SHORT, layout=layout, max_shard_size=max_shard_size
    )
    num_files = len(list(path.glob("*.safetensors")))
    assert num_files == 1 if max_shard_size == "1GB" else num_files > 1
    with open_safetensors(path) as tensors:
        is_hub = any(name.startswith("vision_tower.vision_model.") for name in tensors)
    assert is_hub == (layout == "hub")

    config = AutoConfig.from_pretrained(path)
    ours = PagedModel.from_directory(path, Gemma3ForConditionalGeneration, config, max_len=64)
    in_memory = paged_gemma3(random_gemma3(text=SHORT), max_len=64)
    assert jax.tree.structure(ours.params) == jax.tree.structure(in_memory.params)
    for one, other in zip(
        jax.tree.leaves(ours.params), jax.tree.leaves(in_memory.params), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("axes", [(1, 4), (2, 2)])
def test_a_model_over_a_mesh_says_the_same(tiny_gemma3: Path, axes: tuple[int, int]):
    config = AutoConfig.from_pretrained(tiny_gemma3)
    alone = PagedModel.from_directory(
        tiny_gemma3, Gemma3ForConditionalGeneration, config, max_len=128
    )
    _, abstract = build_abstract(Gemma3ForConditionalGeneration, config, dtype=jnp.float32)
    mesh = Mesh(np.array(jax.devices()).reshape(axes), ("data", "model"))
    params = load_params(tiny_gemma3, abstract, RULES, mesh=mesh, use_tqdm=False)
    spread = PagedModel(Gemma3ForConditionalGeneration, config, params, 128)
    assert len(jax.tree.leaves(params)[0].sharding.device_set) == 4
    sample = draw_sample(config, (20, 5, 17))
    assert_close(spread.run(sample), alone.run(sample))


def test_what_the_engine_must_know_is_said():
    config = random_gemma3(text=SHORT, tokens_per_image=16).config
    model = Gemma3ForConditionalGeneration(config, dtype=jnp.float32)
    assert len(model.kv_cache_spec.layers) == 3
    host_inputs = model.host_inputs(config)
    assert host_inputs.encoder_spec == EncoderSpec(
        inputs={"pixel_values": ((3, 56, 56), "float32")}, tokens_per_unit=16
    )
    assert model.has_bidirectional_spans
    units = host_inputs.units({"pixel_values": np.zeros((2, 3, 56, 56), np.float32)})
    assert units["pixel_values"].shape == (2, 3, 56, 56)
