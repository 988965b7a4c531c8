"""InternVL at its published sizes, without weights: every tensor of a checkpoint has one place.

Names and shapes come from HF's module on torch's meta device, told as the file layouts do.
"""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import InternVLConfig
from transformers import InternVLForConditionalGeneration as Reference

from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.internvl.host_inputs import InternVLHostInputs
from mmjax.models.internvl.model import InternVLChatModel, InternVLForConditionalGeneration
from mmjax.weights.load import match_tensors
from mmjax.weights.safetensors import StoredTensor
from tests.models.original_internvl import original_config, to_original

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
VIT_300M = {"attention_bias": True}
VIT_6B = {
    "hidden_size": 3200,
    "intermediate_size": 12800,
    "num_attention_heads": 25,
    "num_hidden_layers": 45,
    "norm_type": "rms_norm",
    "use_qk_norm": True,
}
QWEN2 = {"model_type": "qwen2", "vocab_size": 151674, "rope_scaling": DYNAMIC, "rope_theta": 1e6}
INTERNLM2 = {**QWEN2, "model_type": "llama", "vocab_size": 92553, "rms_norm_eps": 1e-5}
QWEN2_72B = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
}
QWEN2_32B = {
    **QWEN2_72B,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2-2b": (
        {
            **INTERNLM2,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
        },
        VIT_300M,
    ),
    "2-40b": (
        {
            "model_type": "llama",
            "vocab_size": 64010,
            "hidden_size": 7168,
            "intermediate_size": 20480,
            "num_attention_heads": 56,
            "num_hidden_layers": 60,
            "num_key_value_heads": 8,
            "rope_theta": 5e6,
        },
        VIT_6B,
    ),
    "2-76b": (
        {
            **QWEN2_72B,
            "model_type": "llama",
            "vocab_size": 128265,
            "intermediate_size": 28672,
            "rope_theta": 5e5,
        },
        VIT_6B,
    ),
    "3-1b": (
        {
            **QWEN2,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
        },
        VIT_300M,
    ),
    "2.5-26b": (
        {
            **INTERNLM2,
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_attention_heads": 48,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
        },
        VIT_6B,
    ),
    "3-14b": (
        {**QWEN2, **QWEN2_32B, "intermediate_size": 13824, "num_hidden_layers": 48},
        VIT_300M,
    ),
    "3-38b": ({**QWEN2, **QWEN2_32B}, VIT_6B),
    "3-78b": ({**QWEN2, **QWEN2_72B}, VIT_6B),
    "3.5-8b": (
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
        VIT_300M,
    ),
}
"""What the hub's config.json files say of text and vision; the rest are defaults, as there."""

NUM_PARAMETERS = {
    "2-2b": 2.21e9,
    "2-40b": 40.1e9,
    "2-76b": 76.3e9,
    "2.5-26b": 25.5e9,
    "3-1b": 0.94e9,
    "3-14b": 15.1e9,
    "3-38b": 38.4e9,
    "3-78b": 78.4e9,
    "3.5-8b": 8.53e9,
}
IN_INTERNLM2 = ("2-2b", "2.5-26b")
"""Sizes whose files have InternLM2's names."""
SIZES = [
    pytest.param(size, marks=pytest.mark.slow if NUM_PARAMETERS[size] > 26e9 else ())
    for size in PUBLISHED
]

LAYOUTS = {
    "files": {
        "model.language_model.": "language_model.model.",
        "model.": "",
        "lm_": "language_model.lm_",
    },
    "module": {},
    "original": {},
}
"""How each layout tells a prefix of the module's own names; the hub's files and save_pretrained's
are named alike."""


@cache
def published_config(size: str) -> Any:
    text, vision = PUBLISHED[size]
    config = InternVLConfig(text_config=text, vision_config=vision)
    config.transformers_version = "4.52.0.dev0"
    return config


@cache
def reference_tensors(size: str) -> dict[str, torch.Tensor]:
    """HF's names and shapes."""
    with torch.device("meta"):
        return Reference(published_config(size)).state_dict()


def tell(name: str, layout: str) -> str:
    """Return the name that a file of `layout` has for the module's tensor `name`."""
    for old, new in LAYOUTS[layout].items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


@cache
def expected_tensors(size: str) -> dict[str, Any]:
    """Our tree, flat; of either class."""
    model, config = InternVLForConditionalGeneration, published_config(size)
    return flatten_params(build_abstract(model, config, dtype=jnp.bfloat16)[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_every_tensor_is_used_once_and_none_is_left_over(tmp_path: Path, size: str, layout: str):
    config, tensors = published_config(size), reference_tensors(size)
    rules = InternVLForConditionalGeneration.rules(config)
    if layout == "original":
        is_internlm2 = size in IN_INTERNLM2
        tensors = to_original(config, tensors, is_internlm2=is_internlm2)
        config = original_config(config, tmp_path, is_internlm2=is_internlm2)
        rules = InternVLChatModel.rules(config)
        assert InternVLHostInputs(config).encoder_spec == spec_of(size)
    files = [
        StoredTensor(tell(name, layout), "model.safetensors", tuple(tensor.shape), "BF16", None)
        for name, tensor in tensors.items()
    ]
    expected = expected_tensors(size)
    # Reports what is missing, unexpected or misshapen, and two tensors for one place.
    sources = match_tensors(files, expected, rules, source=layout)
    assert sources.keys() == expected.keys()
    assert len({tensor.name for tensor in sources.values()}) == len(files)
    total = sum(int(np.prod(leaf.shape)) for leaf in expected.values())
    assert total == pytest.approx(NUM_PARAMETERS[size], rel=0.01)


def spec_of(size: str) -> Any:
    return InternVLHostInputs(published_config(size)).encoder_spec


def test_both_classes_build_one_tree(tmp_path: Path):
    config = original_config(published_config("3-1b"), tmp_path)
    _, abstract = build_abstract(InternVLChatModel, config, dtype=jnp.bfloat16)
    expected = expected_tensors("3-1b")
    assert {name: leaf.shape for name, leaf in flatten_params(abstract).items()} == {
        name: leaf.shape for name, leaf in expected.items()
    }


def test_a_tile_and_a_step_have_their_shapes():
    config = published_config("3-1b")
    text = config.text_config
    assert spec_of("3-1b").tokens_per_unit == config.image_seq_length == 256
    graphdef, params = build_abstract(InternVLForConditionalGeneration, config, dtype=jnp.bfloat16)
    pixels = jax.ShapeDtypeStruct((2, 3, 448, 448), jnp.float32)
    rows = jax.eval_shape(lambda p, x: bind(graphdef, p).embed_multimodal(x), params, pixels)
    assert (rows.shape, rows.dtype) == ((2, 256, text.hidden_size), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((4, text.hidden_size), jnp.bfloat16)
    logits = jax.eval_shape(lambda p, x: bind(graphdef, p).compute_logits(x), params, hidden)
    assert (logits.shape, logits.dtype) == ((4, text.vocab_size), jnp.float32)
