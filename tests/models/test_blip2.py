"""BLIP-2's arrays against HF's, live: block by block, for every key of the config that matters."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from transformers import Blip2Config, T5Config

from mmjax.errors import CheckpointError
from mmjax.layers.module import build_abstract, flatten_params, unflatten_params
from mmjax.models.blip2.model import Blip2ForConditionalGeneration as Model
from mmjax.models.host_inputs import EncoderSpec
from mmjax.parity.arrays import PagedModel
from mmjax.parity.reference import generate_reference, run_reference
from mmjax.weights.rules import apply_rules
from mmjax.weights.sharding import param_sharding
from tests.models.tiny_blip2 import (
    draw_sample,
    paged_blip2,
    plain_reference,
    random_blip2,
    tiny_config,
    torch_model_and_inputs,
)
from tests.oracle import assert_close

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cross-attention in every block, a text branch, another decoder": {
        "qformer": {"cross_attention_frequency": 1, "use_qformer_text_input": True},
        "text": {
            "do_layer_norm_before": False,
            "tie_word_embeddings": False,
            "enable_bias": False,
        },
    },
    "other tower": {
        "vision": {"qkv_bias": False, "image_size": 37, "hidden_act": "gelu_pytorch_tanh"},
        "num_queries": 1,
    },
}
RULES = Model.rules(None)


@pytest.mark.parametrize("name", CONFIGS)
def test_states_logits_and_tokens_are_hfs(name: str):
    reference = plain_reference() if name == "plain" else random_blip2(tiny_config(**CONFIGS[name]))
    ours = paged_blip2(reference)
    for num_tokens, has_image in ((20, True), (9, False))[: 1 + (name == "plain")]:
        sample = draw_sample(reference.config, num_tokens, has_image=has_image)
        module, inputs = torch_model_and_inputs(reference, sample)
        expected = run_reference(module, inputs, RULES)
        # the tower: embeddings, 2 blocks, norm; 3 blocks of queries, projection; the text model
        assert len(expected) >= 3 + has_image * (4 + 4)
        assert_close(ours.run(sample), expected)
        assert ours.generate(sample, 32) == generate_reference(module, inputs, 32)


def test_pictures_change_the_answer():
    """The oracle would not see what neither side obeys."""
    ours = paged_blip2(plain_reference())
    one, other = (draw_sample(plain_reference().config, 6, seed=seed) for seed in range(2))
    other = replace(one, items=other.items)
    assert np.abs(ours.run(one)["logits"] - ours.run(other)["logits"]).max() > 0.1


def test_the_text_branch_is_dropped():
    for name in (
        "embeddings.word_embeddings.weight",
        "qformer.embeddings.position_embeddings.weight",
        "qformer.encoder.layer.3.intermediate.dense.weight",
        "qformer.encoder.layer.11.output.LayerNorm.bias",
    ):
        assert apply_rules(name, RULES) is None
    kept = "qformer.encoder.layer.3.attention.output.dense.weight"
    assert apply_rules(kept, RULES) == kept


@pytest.mark.parametrize("size", [2, 4])
def test_a_model_over_a_mesh_says_the_same(size: int):
    reference = plain_reference()
    alone = paged_blip2(reference)
    mesh = Mesh(np.array(jax.devices()[:size]), ("model",))
    leaves = {
        name: jax.device_put(leaf, param_sharding(name, leaf.shape, mesh))
        for name, leaf in flatten_params(alone.params).items()
    }
    spread = PagedModel(Model, reference.config, unflatten_params(leaves), 128)
    fc1 = leaves["language_model.layers.0.fc1.weight"]
    assert fc1.addressable_shards[0].data.shape[0] == fc1.shape[0] // size
    sample = draw_sample(reference.config, 20)
    assert_close(spread.run(sample), alone.run(sample))


def test_what_the_engine_must_know_is_said():
    config = tiny_config()
    model = Model(config, dtype=jnp.float32)
    assert model.modalities == ("image",)
    assert set(model.tower_names) == {
        *("vision_model", "query_tokens", "qformer", "language_projection")
    }
    host_inputs = model.host_inputs(config)
    assert host_inputs.encoder_spec == EncoderSpec(
        inputs={"pixel_values": ((3, 32, 32), "float32")}, tokens_per_unit=5
    )
    units = host_inputs.units({"pixel_values": np.zeros((3, 32, 32), np.float32)})
    assert units["pixel_values"].shape == (1, 3, 32, 32)


T5 = Blip2Config(
    text_config=T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (T5, r"`text_config.model_type` is `t5`, which has an encoder of its own"),
        (
            tiny_config(text={"word_embed_proj_dim": 16}),
            r"`text_config.word_embed_proj_dim` is 16, and `hidden_size` 32",
        ),
        (
            tiny_config(text={"layer_norm_elementwise_affine": False}),
            "`layer_norm_elementwise_affine` is false",
        ),
        (tiny_config(vision={"image_size": [32, 40]}), r"`vision_config.image_size` is \[32, 40\]"),
        (tiny_config(qformer={"hidden_act": "mish"}), "activation `mish` is unknown"),
    ],
)
def test_what_cannot_be_served_is_refused(config: Any, match: str):
    with pytest.raises(CheckpointError, match=match):
        build_abstract(Model, config, dtype=jnp.float32)
