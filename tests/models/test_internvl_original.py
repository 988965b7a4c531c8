"""InternVL in the original layout: the same weights under other names answer as HF's do."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.errors import CheckpointError
from mmjax.language.llama.config import LlamaConfig
from mmjax.layers.module import build_abstract
from mmjax.layers.vision import join_squares
from mmjax.models.host_inputs import PromptItem
from mmjax.models.internvl.model import InternVLChatModel, InternVLForConditionalGeneration
from mmjax.parity.arrays import PagedModel
from mmjax.parity.reference import generate_reference, run_reference
from tests.families.internvl import GPT_OSS, PHI3, QWEN3_MOE, TINY, tiny_config
from tests.families.tiny import Media, Words
from tests.models.original_internvl import original_config, to_original
from tests.oracle import assert_close, params_of

LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5}
SIXB = {"norm_type": "rms_norm", "use_qk_norm": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2, tied, 6b": {"vision": SIXB, "tie_word_embeddings": True},
    "internlm2, biases, columns first, state before the last": {
        "text": {**LLAMA, "attention_bias": True},
        "vision_feature_layer": -2,
        "vision": {"attention_bias": True},
    },
    "qwen3_moe": {"text": QWEN3_MOE},
    "gpt_oss": {"text": GPT_OSS},
    "phi3": {"text": PHI3},
    "internlm3": {"text": {"model_type": "internlm3", "head_dim": 16}},
}


@pytest.mark.parametrize(
    "name",
    # Of the decoders with experts the module's layout is compared by default.
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("qwen3_moe", "gpt_oss") else ())
        for name in CONFIGS
    ],
)
def test_states_logits_and_tokens_are_hfs(tmp_path: Path, name: str):
    settings = CONFIGS[name]
    is_tied = settings.get("tie_word_embeddings", False)
    text = {**settings.get("text", {}), "tie_word_embeddings": is_tied}
    vision = settings.get("vision", {})
    config = tiny_config(**{**settings, "text": text, "vision": vision})
    reference = TINY.make_reference(config=config)
    if "columns first" in name:
        shuffle = reference.model.pixel_shuffle
        reference.model.pixel_shuffle = lambda *args, **kwargs: shuffle(*args, **kwargs).transpose(
            1, 2
        )
    is_internlm2 = "internlm2" in name
    version = "v1" if "columns first" in name else "v2"
    hf_config = original_config(config, tmp_path, is_internlm2=is_internlm2, ps_version=version)
    renamed = to_original(config, reference.state_dict(), is_internlm2=is_internlm2)
    assert any("wqkv" in key for key in renamed) == is_internlm2
    _, abstract = build_abstract(InternVLChatModel, hf_config, dtype=jnp.float32)
    files: Any = SimpleNamespace(state_dict=lambda: renamed)
    params = params_of(files, abstract, InternVLChatModel.rules(hf_config))
    ours = PagedModel(InternVLChatModel, hf_config, params, 256)

    parts = (Words(0, 20), Media(0), Words(1, 1), Media(1), Words(2, 7))
    sample = TINY.draw_sample(config, parts)
    inputs = TINY.torch_inputs(reference, sample)
    names = {"pixel_values": "pixel_values_flat", "image_affine": "image_affine"}
    flat = [PromptItem(p, {names[name]: t[name] for name in t}) for p, t in sample.items]
    sample = replace(sample, items=flat)
    rules = InternVLForConditionalGeneration.rules(config)
    expected = run_reference(reference, inputs, rules)
    assert_close(ours.run(sample), expected)
    assert ours.generate(sample, 32) == generate_reference(reference, inputs, 32)


def test_longrope_has_another_name_in_the_first_files(tmp_path: Path):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    llm = {
        **{"model_type": "phi3", "hidden_size": 32, "num_attention_heads": 4, "rope_theta": 1e4},
        **{"max_position_embeddings": 512, "original_max_position_embeddings": 64},
        "rope_scaling": {"type": "su", **factors},
    }
    text_config = original_config(tiny_config(), tmp_path, llm_config=llm).get_text_config()
    read = LlamaConfig.from_hf(text_config).rope_parameters
    expected = {"rope_type": "longrope", "factor": 8, "original_max_position_embeddings": 64}
    assert read == {**read, **expected, **factors}


def test_columns_first_is_the_transpose():
    states = np.random.default_rng(0).normal(size=(2, 16, 3)).astype(np.float32)
    rows, columns = (
        np.asarray(join_squares(jnp.asarray(states), 2, is_transposed=is_transposed))
        for is_transposed in (False, True)
    )
    np.testing.assert_array_equal(rows[:, [0, 2, 1, 3]], columns)
    np.testing.assert_array_equal(rows[0, 1], states[0, [2, 3, 6, 7]].reshape(-1))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"ps_version": "v3"}, "ps_version.*v3"),
        ({"select_layer": 9}, "select_layer.*9"),
        ({"force_image_size": 64}, "force_image_size.*64"),
        ({"downsample_ratio": 0.4}, "downsample_ratio.*0.4"),
        ({"llm_config": {"model_type": "mixtral"}}, "`llm_config.model_type` is `mixtral`"),
        (
            {"llm_config": {"model_type": "internlm2", "rope_pos_id_version": "v2pe"}},
            "rope_pos_id_version.*v2pe",
        ),
        (
            {
                "llm_config": {
                    "model_type": "internlm2",
                    "architectures": ["InternLM2VEForCausalLM"],
                }
            },
            "InternLM2VEForCausalLM",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, settings: dict[str, Any], match: str):
    hf_config = original_config(tiny_config(), tmp_path, **settings)
    with pytest.raises(CheckpointError, match=match):
        build_abstract(InternVLChatModel, hf_config, dtype=jnp.float32)


def test_what_the_configuration_leaves_out(tmp_path: Path):
    """As the code beside the first published checkpoints has it: the 6B tower, v1."""
    vision = {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1}
    hf_config = original_config(
        tiny_config(), tmp_path, vision_config=vision, force_image_size=None
    )
    for key in ("ps_version", "select_layer"):
        delattr(hf_config, key)
    model = InternVLChatModel(hf_config, dtype=jnp.float32)
    assert model.is_transposed
    assert len(model.vision_tower.encoder.layers) == 1
    first: Any = model.vision_tower.encoder.layers[0]
    assert first.self_attn.q_norm is not None
    assert model.multi_modal_projector.linear_1.weight.shape == (32, 4 * 3200)
