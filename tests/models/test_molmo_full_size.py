"""Molmo at its published sizes, without weights: every tensor of a checkpoint has one place.

The names are those of the tiny checkpoints, repeated to the published depth.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import PreTrainedConfig

from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.molmo.host_inputs import MolmoHostInputs
from mmjax.models.molmo.model import MolmoForCausalLM
from mmjax.weights.load import match_tensors
from mmjax.weights.safetensors import StoredTensor, open_safetensors
from tests.models.golden_models import GOLDEN_MODELS

COMMON = {
    "model_type": "molmo",
    "layer_norm_type": "rms",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "weight_tying": False,
    "clip_qkv": None,
}
QWEN2 = {"attention_layer_norm": False, "norm_after": False, "qkv_bias": True, "rope_theta": 1e6}
PUBLISHED: dict[str, dict[str, Any]] = {
    "7b_d": {
        **QWEN2,
        "embedding_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 37888,
        "layer_norm_eps": 1e-6,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "7b_o": {
        "attention_layer_norm": True,
        "embedding_size": 100352,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "layer_norm_eps": 1e-6,
        "norm_after": True,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "qkv_bias": False,
        "rope_theta": 500000,
        "vocab_size": 100278,
    },
    "72b": {
        **QWEN2,
        "embedding_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 59136,
        "layer_norm_eps": 1e-5,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
}
NUM_PARAMETERS = {"7b_d": 8.0e9, "7b_o": 7.7e9, "72b": 73.3e9}
VIT_WIDTH, VIT_INNER, VIT_BLOCKS = 1024, 4096, 23


def published_config(size: str) -> Any:
    return PreTrainedConfig(**COMMON, **PUBLISHED[size])


@pytest.fixture(scope="module", params=PUBLISHED)
def size(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def abstract(size: str) -> dict[str, Any]:
    """Our tree, flat."""
    built = build_abstract(MolmoForCausalLM, published_config(size), dtype=jnp.bfloat16)
    return flatten_params(built[1])


def published_shape(name: str, config: Any) -> tuple[int, ...]:
    """Return a tensor's shape by the published code, of the last parts of its name."""
    width, inner = config.hidden_size, config.intermediate_size // 2
    key_width = (
        width
        // config.num_attention_heads
        * (config.num_key_value_heads or config.num_attention_heads)
    )
    fused, pooled = width + 2 * key_width, 2 * VIT_WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        r"wte\.embedding$": (config.embedding_size, width),
        r"wte\.new_embedding$": (128, width),
        r"transformer\.ff_out\.weight$": (config.embedding_size, width),
        r"blocks\.\d+\.att_proj\.weight$": (fused, width),
        r"blocks\.\d+\.att_proj\.bias$": (fused,),
        r"blocks\.\d+\.attn_out\.weight$": (width, width),
        r"blocks\.\d+\.ff_proj\.weight$": (2 * inner, width),
        r"blocks\.\d+\.ff_out\.weight$": (width, inner),
        r"\.k_norm\.weight$": (key_width,),
        r"\.(q_norm|attn_norm|ff_norm|ln_f)\.weight$": (width,),
        r"image_pooling_2d\.w[qkv]\.weight$": (VIT_WIDTH, pooled),
        r"image_projector\.w[13]\.weight$": (inner, VIT_WIDTH),
        r"image_projector\.w2\.weight$": (width, inner),
        r"\.pad_embed$": (2, pooled),
        r"\.patch_embedding\.weight$": (VIT_WIDTH, 588),
        r"\.positional_embedding$": (577, VIT_WIDTH),
        r"feed_forward\.w1\.weight$": (VIT_INNER, VIT_WIDTH),
        r"feed_forward\.w1\.bias$": (VIT_INNER,),
        r"feed_forward\.w2\.weight$": (VIT_WIDTH, VIT_INNER),
        r"(attention|image_pooling_2d)\.w[qkvo]\.weight$": (VIT_WIDTH, VIT_WIDTH),
        r"\.bias$|_ln\.weight$|class_embedding$|(attention|ffn)_norm\.weight$": (VIT_WIDTH,),
    }
    return next(shape for pattern, shape in shapes.items() if re.search(pattern, name))


def published_tensors(size: str) -> list[StoredTensor]:
    """Return the tiny checkpoint's tensors at the published depth and widths."""
    config = published_config(size)
    names = set()
    with open_safetensors(GOLDEN_MODELS / f"molmo_{'7b_o' if size == '7b_o' else '7b_d'}") as tiny:
        for name in tiny:
            depth = VIT_BLOCKS if "resblocks" in name else config.num_hidden_layers
            names |= {re.sub(r"blocks\.\d+\.", f"blocks.{i}.", name) for i in range(depth)}
    return [
        StoredTensor(name, "model.safetensors", published_shape(name, config), "BF16", None)
        for name in sorted(names)
    ]


def test_every_tensor_is_used_once_and_none_is_left_over(size: str, abstract: dict[str, Any]):
    tensors = published_tensors(size)
    rules = MolmoForCausalLM.rules(published_config(size))
    # Reports what is missing, unexpected or misshapen, and two tensors for one place.
    sources = match_tensors(tensors, abstract, rules, source=size)
    assert sources.keys() == abstract.keys()
    unread = {one.name for one in tensors} - {one.name for one in sources.values()}
    assert {re.sub(r"(resblocks\.\d+)\..*", r"\1", name) for name in unread} == {
        "model.vision_backbone.image_vit.transformer.resblocks.22"
    }


def test_the_size_is_the_published_one(size: str, abstract: dict[str, Any]):
    total = sum(int(np.prod(leaf.shape)) for leaf in abstract.values())
    assert total == pytest.approx(NUM_PARAMETERS[size], rel=0.01)


def test_a_crop_and_a_step_have_their_shapes(size: str):
    config = published_config(size)
    graphdef, params = build_abstract(MolmoForCausalLM, config, dtype=jnp.bfloat16)
    spec = MolmoHostInputs(config).encoder_spec
    inputs = {
        name: jax.ShapeDtypeStruct((2, *shape), dtype)
        for name, (shape, dtype) in spec.inputs.items()
    }
    assert inputs["images"].shape == (2, 576, 588)
    rows = jax.eval_shape(lambda p, x: bind(graphdef, p).embed_multimodal(**x), params, inputs)
    assert (rows.shape, rows.dtype) == ((2, 144, config.hidden_size), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((4, config.hidden_size), jnp.bfloat16)
    logits = jax.eval_shape(lambda p, x: bind(graphdef, p).compute_logits(x), params, hidden)
    assert (logits.shape, logits.dtype) == ((4, config.embedding_size), jnp.float32)
