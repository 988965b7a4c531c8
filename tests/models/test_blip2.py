"""BLIP-2 beyond the laws: what is loaded, what the engine must know, what is refused."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from transformers import Blip2Config, T5Config

from mmjax.errors import CheckpointError
from mmjax.layers.module import build_abstract
from mmjax.models.blip2.model import Blip2ForConditionalGeneration as Model
from mmjax.models.host_inputs import EncoderSpec, byte_pixels
from mmjax.weights.rules import apply_rules
from tests.models.families.blip2 import tiny_config

RULES = Model.rules(tiny_config())


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


def test_what_the_engine_must_know_is_said():
    config = tiny_config()
    model = Model(config, dtype=jnp.float32)
    assert model.modalities == ("image",)
    assert set(model.tower_names) == {
        *("vision_model", "query_tokens", "qformer", "language_projection")
    }
    host_inputs = model.host_inputs(config)
    assert host_inputs.encoder_spec == EncoderSpec(
        inputs=byte_pixels("pixel_values", (3, 32, 32)), tokens_per_unit=5
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
