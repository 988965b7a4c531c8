"""InternVL's arrays against HF's, live: block by block, for the config's keys that matter."""

from typing import Any

import numpy as np
import pytest

from mmjax.errors import CheckpointError
from mmjax.layers.module import build_abstract
from mmjax.models.host_inputs import EncoderSpec
from mmjax.models.internvl.host_inputs import InternVLHostInputs
from mmjax.models.internvl.model import InternVLForConditionalGeneration
from mmjax.parity.reference import generate_reference, run_reference
from tests.models.tiny_internvl import (
    SIDE,
    draw_sample,
    paged_internvl,
    random_internvl,
    tiny_config,
    torch_inputs,
    words,
)
from tests.oracle import assert_close

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2, tied, squares of four": {
        "vision": {"attention_bias": True, "use_mean_pooling": False},
        "tie_word_embeddings": True,
        "downsample_ratio": 0.25,
        "projector_hidden_act": "relu",
    },
    "llama, 6b": {
        "text": {"model_type": "llama", "rms_norm_eps": 1e-5},
        "vision": {"norm_type": "rms_norm", "use_qk_norm": True},
    },
    "qwen3, state before the last": {
        "text": {"model_type": "qwen3", "head_dim": 12},
        "vision_feature_layer": -2,
        "vision": {"use_mean_pooling": False, "use_mask_token": True},
    },
    "first state, no squares": {"downsample_ratio": 1.0, "vision_feature_layer": 1},
}
SHORT = {"num_hidden_layers": 2}


@pytest.mark.parametrize("name", CONFIGS)
def test_states_logits_and_tokens_are_hfs(name: str):
    settings = CONFIGS[name]
    config = tiny_config(**{**settings, "vision": {**SHORT, **settings.get("vision", {})}})
    reference = random_internvl(config)
    # a picture with a thumbnail, one of a single tile
    sample = draw_sample(config, (words(0, 20), 3, words(1, 1), 1, words(2, 7)))
    rules = InternVLForConditionalGeneration.rules(config)
    expected = run_reference(reference, torch_inputs(sample), rules)
    # the tower's embeddings and a block; the projector; 2 blocks, norm, logits
    assert len(expected) >= 2 + 1 + 4

    ours = paged_internvl(reference)
    assert_close(ours.run(sample), expected)
    assert ours.generate(sample, 32) == generate_reference(reference, torch_inputs(sample), 32)


def test_any_number_of_pictures_and_frames():
    config = tiny_config(vision=SHORT)
    reference = random_internvl(config, 1)
    ours = paged_internvl(reference)
    rules = InternVLForConditionalGeneration.rules(config)
    for parts, name in (
        ((), "pixel_values"),
        ((1,), "pixel_values"),
        ((1, 2, 3), "pixel_values"),
        ((5,), "pixel_values_videos"),
    ):
        sample = draw_sample(config, (words(3, 9), *parts, words(4, 5)), name)
        expected = run_reference(reference, torch_inputs(sample), rules)
        assert_close(ours.run(sample), expected)


def test_a_state_that_nobody_reads_is_not_there():
    config = tiny_config(vision_feature_layer=-3, vision={"use_mean_pooling": False})
    _, abstract = build_abstract(InternVLForConditionalGeneration, config, dtype=np.float32)
    assert len(abstract["vision_tower"]["encoder"]["layers"]) == 1
    assert "layernorm" not in abstract["vision_tower"]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy.*full"),
        ({"vision_feature_layer": [-1, -2]}, r"vision_feature_layer.*\[-1, -2\]"),
        ({"vision_feature_layer": 4}, "vision_feature_layer.*4"),
        ({"vision_feature_layer": -5}, "vision_feature_layer.*-5"),
        ({"downsample_ratio": 0.3}, "downsample_ratio.*0.3"),
        ({"downsample_ratio": 1 / 3}, "downsample_ratio.*0.33"),
        ({"downsample_ratio": 2.0}, "downsample_ratio.*2.0"),
        ({"projector_hidden_act": "mish"}, "mish"),
        ({"vision": {"norm_type": "batch_norm"}}, "norm_type.*batch_norm"),
        ({"vision": {"image_size": [32, 64]}}, r"image_size.*\[32, 64\]"),
        ({"vision": {"patch_size": [8, 4]}}, r"patch_size.*\[8, 4\]"),
        ({"text": {"model_type": "gpt2"}}, "gpt2"),
    ],
)
def test_what_cannot_be_served_is_refused(settings: dict[str, Any], match: str):
    with pytest.raises(CheckpointError, match=match):
        build_abstract(InternVLForConditionalGeneration, tiny_config(**settings), dtype=np.float32)


@pytest.mark.parametrize(
    ("version", "outer", "inner", "is_tied"),
    [
        (None, True, False, True),
        ("5.23.0", True, False, True),
        ("5.23.0", False, True, False),
        ("4.52.0.dev0", True, False, False),
        ("4.57.1", True, True, True),
    ],
)
def test_whose_key_ties_the_head(version: str | None, outer: bool, inner: bool, is_tied: bool):
    config = tiny_config({"tie_word_embeddings": inner}, tie_word_embeddings=outer)
    config.transformers_version = version
    _, abstract = build_abstract(InternVLForConditionalGeneration, config, dtype=np.float32)
    assert ("lm_head" not in abstract["language_model"]) == is_tied


def test_what_the_engine_must_know_is_said():
    model = InternVLForConditionalGeneration(tiny_config(), dtype=np.float32)
    assert len(model.kv_cache_spec.layers) == 2
    assert model.modalities == ("image", "video")
    host_inputs = InternVLHostInputs(tiny_config(downsample_ratio=0.25))
    assert host_inputs.encoder_spec == EncoderSpec(
        inputs={"pixel_values": ((3, SIDE, SIDE), "float32")}, tokens_per_unit=1
    )
    for name in ("pixel_values", "pixel_values_videos"):
        units = host_inputs.units({name: np.zeros((2, 3, SIDE, SIDE), np.float32)})
        assert units["pixel_values"].shape == (2, 3, SIDE, SIDE)
