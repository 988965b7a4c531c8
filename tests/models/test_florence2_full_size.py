"""Florence-2 at its published sizes, without weights: every tensor of a checkpoint has one place.

Names and shapes come from HF's module on torch's meta device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Florence2Config, Florence2ForConditionalGeneration

from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.florence2.host_inputs import Florence2HostInputs
from mmjax.models.florence2.model import Florence2ForConditionalGeneration as Model
from mmjax.models.interface import embed_units
from mmjax.weights.load import match_tensors
from mmjax.weights.safetensors import StoredTensor

BASE: dict[str, Any] = {
    "vision": {"projection_dim": 768, "image_size": 768},
    "text": {
        "vocab_size": 51328,
        "d_model": 768,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "max_position_embeddings": 1024,
    },
}
LARGE: dict[str, Any] = {
    "vision": {
        "embed_dim": [256, 512, 1024, 2048],
        "num_heads": [8, 16, 32, 64],
        "num_groups": [8, 16, 32, 64],
        "projection_dim": 1024,
        "image_size": 768,
    },
    "text": {
        "vocab_size": 51328,
        "d_model": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "max_position_embeddings": 4096,
    },
}
PUBLISHED = {"base": BASE, "large": LARGE}
"""What the sizes differ in from HF's defaults."""
NUM_PARAMETERS = {"base": 0.23e9, "large": 0.77e9}

TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
"""Copies of the one table of tokens, which `save_pretrained` leaves out."""


def published_config(size: str) -> Any:
    parts = PUBLISHED[size]
    return Florence2Config(
        vision_config=parts["vision"],
        text_config={"model_type": "bart", **parts["text"]},
        image_token_id=51289,
    )


@pytest.fixture(scope="module", params=PUBLISHED)
def size(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def shapes(size: str) -> dict[str, tuple[int, ...]]:
    """HF's names and shapes."""
    with torch.device("meta"):
        module = Florence2ForConditionalGeneration(published_config(size))
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def test_every_tensor_is_used_once_and_none_is_left_over(
    size: str, shapes: dict[str, tuple[int, ...]]
):
    config = published_config(size)
    abstract = flatten_params(build_abstract(Model, config, dtype=jnp.bfloat16)[1])
    tensors = [
        StoredTensor(name, "model.safetensors", shape, "BF16", None)
        for name, shape in shapes.items()
        if not name.endswith(TIED)
    ]
    # Reports what is missing, unexpected or misshapen, and two tensors for one place.
    sources = match_tensors(tensors, abstract, Model.rules(config), source=size)
    assert sources.keys() == abstract.keys()
    assert len({tensor.name for tensor in sources.values()}) == len(tensors)
    total = sum(int(np.prod(leaf.shape)) for leaf in abstract.values())
    assert total == pytest.approx(NUM_PARAMETERS[size], rel=0.02)


def test_a_prompt_and_a_step_have_their_shapes(size: str):
    config = published_config(size)
    host_inputs = Florence2HostInputs(config)
    assert (host_inputs.num_image_rows, host_inputs.max_encoder_len) == (577, 1024)
    width = config.text_config.d_model
    graphdef, params = build_abstract(Model, config, dtype=jnp.bfloat16)
    units = {
        name: jax.ShapeDtypeStruct((2, *shape), dtype)
        for name, (shape, dtype) in host_inputs.encoder_spec.inputs.items()
    }
    rows = jax.eval_shape(lambda p, x: embed_units(bind(graphdef, p), x), params, units)
    assert (rows.shape, rows.dtype) == ((2, 577, width), jnp.bfloat16)
    prompts = jax.ShapeDtypeStruct((2, 1024, width), jnp.bfloat16)
    is_token = jax.ShapeDtypeStruct((2, 1024), jnp.bool)
    states = jax.eval_shape(
        lambda p, *x: bind(graphdef, p).encode_prompts(*x), params, prompts, is_token
    )
    assert (states.shape, states.dtype) == ((2, 1024, width), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((4, width), jnp.bfloat16)
    logits = jax.eval_shape(lambda p, x: bind(graphdef, p).compute_logits(x), params, hidden)
    assert (logits.shape, logits.dtype) == ((4, 51328), jnp.float32)
