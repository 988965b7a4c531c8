"""BART's encoder against HF's: a batch of prompts of several lengths, padded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import BartConfig as HFBartConfig
from transformers import BartModel

from mmjax.errors import CheckpointError
from mmjax.language.encoder_decoder.bart import BartConfig, BartDecoder, BartEncoder
from mmjax.layers.module import bind, build_abstract
from mmjax.weights.rules import Rule
from tests.families.florence2 import TEXT, fill
from tests.oracle import TOLERANCE, params_of

LENGTHS = (9, 1, 5)


@pytest.fixture(scope="module")
def reference() -> Any:
    settings: dict[str, Any] = {name: value for name, value in TEXT.items() if name != "model_type"}
    model = BartModel(HFBartConfig(**settings)).eval()
    fill(model)
    return model


def test_padded_prompts_have_hfs_states(reference: Any):
    config = BartConfig.from_hf(reference.config)
    graphdef, abstract = build_abstract(BartEncoder, config, dtype=jnp.float32)
    rules = (Rule("embed_tokens", None), Rule(r"\.(fc[12])\.", r".mlp.\1."))
    params = params_of(reference.encoder, abstract, rules)
    shape = (len(LENGTHS), max(LENGTHS), config.d_model)
    embeds = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    is_token = np.arange(max(LENGTHS))[None] < np.array(LENGTHS)[:, None]
    states = jax.jit(lambda p, x, m: bind(graphdef, p)(x, m))(params, embeds, is_token)
    for row, length in enumerate(LENGTHS):
        with torch.no_grad():
            alone = reference.encoder(inputs_embeds=torch.tensor(embeds[row : row + 1, :length]))
        expected = alone.last_hidden_state[0].numpy()
        np.testing.assert_allclose(states[row, :length], expected, atol=TOLERANCE)
    assert np.isfinite(states).all()


def test_tokens_are_scaled_where_the_config_says_so(reference: Any):
    values: dict[str, Any] = {**reference.config.to_dict(), "scale_embedding": True}
    config = BartConfig.from_hf(HFBartConfig(**values))
    assert config.embed_scale == pytest.approx(32**0.5)
    decoder = BartDecoder(config, is_tied=True, dtype=jnp.float32)
    assert len(decoder.kv_cache_spec.layers) == TEXT["decoder_layers"]
    assert decoder.lm_head is None


def test_an_activation_that_is_not_known_is_refused(reference: Any):
    values: dict[str, Any] = {**reference.config.to_dict(), "activation_function": "mish"}
    with pytest.raises(CheckpointError, match="activation `mish` is unknown"):
        BartEncoder(BartConfig.from_hf(HFBartConfig(**values)), dtype=jnp.float32)
