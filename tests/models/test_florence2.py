"""Florence-2's arrays against HF's, live: tower, projector, both halves of BART, logits, tokens."""

from typing import Any

import numpy as np
import pytest

from mmjax.errors import CheckpointError
from mmjax.models.florence2.host_inputs import Florence2HostInputs
from mmjax.models.florence2.model import Florence2ForConditionalGeneration as Model
from mmjax.models.host_inputs import EncoderSpec
from mmjax.parity.reference import generate_reference, run_reference
from tests.models.random_florence2 import (
    draw_pixels,
    draw_sample,
    paged_florence2,
    random_florence2,
    tiny_config,
    torch_inputs,
)
from tests.oracle import assert_close

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide pictures, deeper stages, scaled embeddings, a head of its own": {
        "vision": {"image_size": [20, 37], "depths": [2, 1], "window_size": 2, "qkv_bias": False},
        "text": {"scale_embedding": True},
        "is_tied": False,
    },
    "three stages, norms elsewhere, other heads and depths, relu": {
        "vision": {
            "depths": [1, 0, 1],
            "patch_size": [5, 2, 3],
            "patch_stride": [2, 2, 2],
            "patch_padding": [2, 0, 1],
            "patch_prenorm": [True, False, True],
            "embed_dim": [4, 8, 12],
            "num_heads": [1, 2, 3],
            "num_groups": [1, 2, 2],
            "mlp_ratio": 2.5,
            "activation_function": "gelu_new",
        },
        "text": {
            "encoder_layers": 1,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "activation_function": "relu",
        },
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_states_logits_and_tokens_are_hfs(name: str):
    reference = random_florence2(**CONFIGS[name])
    config = reference.config
    ours, rules = paged_florence2(reference), Model.rules(config)
    for picture in (1, None):
        sample = draw_sample(config, 7, picture=picture, answer=(5, 9, 40, 8))
        expected = run_reference(reference, torch_inputs(sample), rules)
        layers = {f"encoder.layers.{i}" for i in range(config.text_config.encoder_layers)}
        assert layers < expected.keys()
        assert ("multi_modal_projector" in expected) == (picture is not None)
        assert_close(ours.run(sample), expected)
        tokens = generate_reference(reference, torch_inputs(sample), 32)
        assert ours.generate(sample, 32) == tokens


def test_what_the_engine_must_know_is_said():
    config = tiny_config(vision={"image_size": [20, 37]})
    host_inputs = Florence2HostInputs(config)
    assert host_inputs.num_image_rows == 3 * 5 + 1
    assert host_inputs.max_encoder_len == 64
    pixels = draw_pixels(config, 0)
    units = host_inputs.units({"pixel_values": pixels})
    np.testing.assert_array_equal(units["pixel_values"], pixels[None])
    spec = host_inputs.encoder_spec
    assert isinstance(spec, EncoderSpec)
    assert spec.tokens_per_unit == 16


def test_the_longest_encoder_prompt_is_bounded():
    config = tiny_config(text={"max_position_embeddings": 4096})
    assert Florence2HostInputs(config).max_encoder_len == 1024


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vision": {"projection_dim": 16}}, "`vision_config.projection_dim` is 16"),
        ({"text": {"tie_word_embeddings": False}}, "`text_config.tie_word_embeddings` is false"),
        ({"text": {"max_position_embeddings": 10}}, "is 10 tokens, and the encoder takes 10"),
        ({"vision": {"max_position_embeddings": 2}}, "pictures of 24x24 pixels make 3 columns"),
        ({"vision": {"num_heads": [2]}}, "`num_heads` 1"),
        ({"vision": {"activation_function": "mish"}}, "activation `mish` is unknown"),
        ({"vision": {"image_feature_source": ["last_frame"]}}, "is \\['last_frame'\\]"),
        ({"vision": {"image_size": None}}, "the image processor's configuration in ``"),
        ({"text": {"model_type": "llama"}}, "`text_config.model_type` is `llama`"),
    ],
)
def test_what_a_config_cannot_have_is_named(settings: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        Model(tiny_config(**settings), dtype=np.dtype(np.float32))
