"""LLaVA at its published sizes, without weights: every tensor of a checkpoint has one place.

Names and shapes come from HF's module on torch's meta device, told as both file layouts do.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.host_inputs import EncoderSpec
from mmjax.models.interface import embed_units
from mmjax.models.llava import model as llava
from mmjax.models.pixtral.model import PixtralForConditionalGeneration
from mmjax.weights.load import match_tensors
from mmjax.weights.rules import apply_rules
from mmjax.weights.safetensors import StoredTensor

CLIP = {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "model_type": "clip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "projection_dim": 768,
    "vocab_size": 32000,
}
SIGLIP = {
    "hidden_size": 1152,
    "image_size": 384,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": {
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    },
    "llava-1.5-13b": {
        "text_config": {
            "model_type": "llama",
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "max_position_embeddings": 4096,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 40,
            "vocab_size": 32064,
        }
    },
    "llava-interleave-qwen-0.5b": {
        "image_seq_length": 729,
        "image_token_index": 151646,
        "vision_config": {**SIGLIP, "num_hidden_layers": 26, "vision_use_head": False},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "text_config": {
            "model_type": "qwen2",
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
            "vocab_size": 152000,
        },
    },
    "bakllava-7b": {
        "text_config": {
            "model_type": "mistral",
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "vocab_size": 32064,
        }
    },
    "llama 3.1 behind siglip": {
        "image_seq_length": 729,
        "image_token_index": 128077,
        "vision_config": SIGLIP,
        "vision_feature_select_strategy": "full",
        "text_config": {
            "model_type": "llama",
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rope_scaling": LLAMA3,
            "rope_theta": 500000.0,
            "vocab_size": 128256,
        },
    },
    "pixtral-12b": {
        "image_seq_length": 1,
        "image_token_index": 10,
        "vision_config": {
            "head_dim": 64,
            "hidden_act": "silu",
            "image_size": 1024,
            "model_type": "pixtral",
            "patch_size": 16,
            "rope_theta": 10000.0,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "text_config": {
            "model_type": "mistral",
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 14336,
            "max_position_embeddings": 1024000,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
    },
}
"""What the hub's config.json files say; the rest are defaults, as there."""

NUM_PARAMETERS = {
    "llava-1.5-7b": 7.05e9,
    "llava-1.5-13b": 13.34e9,
    "llava-interleave-qwen-0.5b": 0.864e9,
    "bakllava-7b": 7.55e9,
    "llama 3.1 behind siglip": 8.45e9,
    "pixtral-12b": 12.68e9,
}
NUM_UNREAD = {
    # of the last block, its norm; SigLIP's pooling head too
    "llava-1.5-7b": 16 + 2,
    "llava-1.5-13b": 16 + 2,
    "llava-interleave-qwen-0.5b": 2,
    "bakllava-7b": 16 + 2,
    "llama 3.1 behind siglip": 16 + 2 + 11,
    "pixtral-12b": 0,
}
TOKENS_PER_IMAGE = dict.fromkeys(PUBLISHED, 576) | {
    "llama 3.1 behind siglip": 729,
    "llava-interleave-qwen-0.5b": 729,
}

LAYOUTS = {
    "hub": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.{inner}",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    },
    "save_pretrained": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    },
    "module": {},
}
"""How each layout tells a prefix of the module's own names."""


def published_config(name: str) -> Any:
    return LlavaConfig(**{"vision_config": CLIP, **PUBLISHED[name]})


@pytest.fixture(scope="module", params=PUBLISHED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def abstract(name: str) -> dict[str, Any]:
    """Our tree, flat."""
    return flatten_params(
        build_abstract(model_of(name), published_config(name), dtype=jnp.bfloat16)[1]
    )


@pytest.fixture(scope="module")
def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """HF's names and shapes, without a tied head."""
    config = published_config(name)
    with torch.device("meta"):
        module = LlavaForConditionalGeneration(config)
    found = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    if config.tie_word_embeddings:
        del found["lm_head.weight"]
    return found


def model_of(name: str) -> Any:
    """Return our class for a published model."""
    is_pixtral = name == "pixtral-12b"
    return PixtralForConditionalGeneration if is_pixtral else llava.LlavaForConditionalGeneration


def tell(name: str, layout: str, inner: str) -> str:
    """Return the name that a file of `layout` has for the module's tensor `name`.

    `inner`: what the tower's own class calls itself in the hub's files.
    """
    for old, new in LAYOUTS[layout].items():
        if name.startswith(old):
            return new.format(inner=inner) + name.removeprefix(old)
    return name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_used_once_but_for_what_nobody_reads(
    name: str, abstract: dict[str, Any], shapes: dict[str, tuple[int, ...]], layout: str
):
    inner = "" if name == "pixtral-12b" else "vision_model."
    tensors = [
        StoredTensor(tell(key, layout, inner), "model.safetensors", shape, "BF16", None)
        for key, shape in shapes.items()
    ]
    rules = model_of(name).rules(published_config(name))
    # Reports what is missing, unexpected or misshapen, and two tensors for one place.
    sources = match_tensors(tensors, abstract, rules, source=layout)
    assert sources.keys() == abstract.keys()
    unread = [tensor.name for tensor in tensors if apply_rules(tensor.name, rules) is None]
    assert len(unread) == NUM_UNREAD[name]
    assert len({tensor.name for tensor in sources.values()}) == len(tensors) - len(unread)


def test_the_size_is_the_published_one(name: str, abstract: dict[str, Any]):
    total = sum(int(np.prod(leaf.shape)) for leaf in abstract.values())
    assert total == pytest.approx(NUM_PARAMETERS[name], rel=0.01)


def test_a_picture_and_a_step_have_their_shapes(name: str):
    config = published_config(name)
    width = config.text_config.hidden_size
    graphdef, params = build_abstract(model_of(name), config, dtype=jnp.bfloat16)
    spec = model_of(name).host_inputs(config).encoder_spec
    if isinstance(spec, EncoderSpec):
        assert spec.tokens_per_unit == TOKENS_PER_IMAGE[name]
        size, expected, packed = 2, (2, TOKENS_PER_IMAGE[name], width), {}
    else:
        size, expected = 256, (256, width)
        packed = {"segment_ids": jax.ShapeDtypeStruct((256,), jnp.int32)}
    inputs = packed | {
        key: jax.ShapeDtypeStruct((size, *shape), dtype)
        for key, (shape, dtype) in spec.inputs.items()
    }
    rows = jax.eval_shape(lambda p, x: embed_units(bind(graphdef, p), x), params, inputs)
    assert (rows.shape, rows.dtype) == (expected, jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((4, width), jnp.bfloat16)
    logits = jax.eval_shape(lambda p, x: bind(graphdef, p).compute_logits(x), params, hidden)
    assert (logits.shape, logits.dtype) == ((4, config.text_config.vocab_size), jnp.float32)
