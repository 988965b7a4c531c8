"""BLIP-2 beyond the laws: what is loaded, what the engine must know, what is refused."""

import jax.numpy as jnp
import numpy as np

from mmjax.models.blip2.model import Blip2ForConditionalGeneration as Model
from mmjax.models.host_inputs import EncoderSpec, byte_pixels
from mmjax.weights.rules import apply_rules
from tests.families.blip2 import tiny_config

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
