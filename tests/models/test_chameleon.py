"""Chameleon beyond the laws: codes, refusals, published sizes, cut norms, a directory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh

from mmjax.errors import CheckpointError
from mmjax.layers.attention.kv_cache import KVCacheSpec
from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.chameleon.model import ChameleonForConditionalGeneration as Model
from mmjax.models.chameleon.model import CodeTokens
from mmjax.models.host_inputs import EncoderSpec, byte_pixels
from mmjax.parity.compare import LOGITS
from mmjax.weights.sharding import param_sharding
from tests.families import served_model
from tests.families.chameleon import (
    FIRST_CODE,
    NUM_CODES,
    TOKENS_PER_IMAGE,
    VOCAB_SIZE,
    draw_item,
    tiny_config,
)
from tests.families.tiny import Media, Words

RULES = Model.rules(None)


def test_codes_are_never_sampled():
    model = served_model("chameleon")
    sample = model.draw_sample([Words(0, 20)])
    logits = model.paged.run(sample)[LOGITS]
    is_code = np.isin(np.arange(VOCAB_SIZE), np.arange(FIRST_CODE, FIRST_CODE + NUM_CODES))
    assert ((logits == np.finfo(np.float32).min) == is_code).all()


def test_codes_would_be_sampled_if_they_could():
    """No answer would show a mask that masks nothing of interest."""
    served = served_model("chameleon")
    graphdef, _ = build_abstract(Model, served.config, dtype=jnp.float32)
    model = bind(graphdef, served.params)
    hidden = jax.random.normal(jax.random.key(0), (64, 32))
    free = model.language_model.compute_logits(hidden).argmax(-1)
    assert ((free >= FIRST_CODE) & (free < FIRST_CODE + NUM_CODES)).any()


def test_embeddings_are_hfs():
    model = served_model("chameleon")
    reference = model.reference
    pixels = np.random.default_rng(0).uniform(-1, 1, (2, 3, 8, 8)).astype(np.float32)
    with torch.no_grad():
        expected = reference.get_image_features(torch.tensor(pixels), return_dict=True)
    graphdef, _ = build_abstract(Model, reference.config, dtype=jnp.float32)
    rows = jax.jit(lambda p, x: bind(graphdef, p).embed_multimodal(x))(model.params, pixels)
    assert len(np.unique(np.asarray(rows).reshape(32, -1), axis=0)) > 5
    np.testing.assert_array_equal(rows, expected.pooler_output)


def test_what_the_engine_must_know_is_said():
    config = tiny_config(num_key_value_heads=2)
    host_inputs = Model.host_inputs(config)
    assert host_inputs.encoder_spec == EncoderSpec(
        inputs=byte_pixels("pixel_values", (3, 8, 8)), tokens_per_unit=TOKENS_PER_IMAGE
    )
    item = draw_item(config, Media(0)).tensors
    assert host_inputs.units(item)["pixel_values"].shape == (1, 3, 8, 8)
    assert host_inputs.embed_rows(item) is None
    spec = Model(config, dtype=jnp.float32).kv_cache_spec
    assert spec == KVCacheSpec.alike(2, num_kv_heads=2, head_dim=8)


WORDS = {"<image>": 2, "word": 3}


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        (None, "`vocabulary_map` is missing in config.json"),
        (WORDS | {"IMGIMGAZ": 5}, "no token for 2 of the 3 codes .* the first of which is 1"),
        (WORDS | {"IMGIMGxZ": 5}, "has `IMGIMGxZ`, which names no code"),
    ],
)
def test_a_vocabulary_without_codes_is_refused(mapping: Any, words: str):
    with pytest.raises(CheckpointError, match=words):
        CodeTokens.from_map(mapping, 3)


# ---- devices -------------------------------------------------------------------------------------


def test_each_of_four_devices_holds_the_norm_of_its_head():
    _, abstract = build_abstract(Model, tiny_config(), dtype=jnp.float32)
    mesh = Mesh(np.array(jax.devices()), ("model",))
    name = "language_model.layers.0.self_attn.q_norm.bias"
    shape = flatten_params(abstract)[name].shape
    assert param_sharding(name, shape, mesh).shard_shape(shape) == (1, 8)
