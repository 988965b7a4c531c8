"""BLIP-2 at its published sizes, without weights: every tensor of a checkpoint has one place.

Names and shapes come from HF's module on torch's meta device; the hub's files have the same names.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Blip2Config, Blip2ForConditionalGeneration, OPTConfig

from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.blip2.model import Blip2ForConditionalGeneration as Model
from mmjax.weights.load import match_tensors
from mmjax.weights.safetensors import StoredTensor

PUBLISHED: dict[str, dict[str, Any]] = {
    "opt-2.7b": {"hidden_size": 2560, "ffn_dim": 10240, "num_hidden_layers": 32},
    "opt-6.7b": {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32},
}
"""What the hub's `text_config`s say; the rest are defaults, as there."""

NUM_PARAMETERS = {"opt-2.7b": 3.74e9, "opt-6.7b": 7.75e9}
TIED_HEAD = "language_model.lm_head.weight"
UNREAD = (
    "qformer.embeddings.word_embeddings.weight",
    "qformer.encoder.layer.0.intermediate.dense.weight",
    "qformer.encoder.layer.0.output.LayerNorm.bias",
)
"""Of the text branch, which files of the retrieval models have."""


def published_config(size: str) -> Any:
    text = OPTConfig(num_attention_heads=32, vocab_size=50304, **PUBLISHED[size])
    return Blip2Config(text_config=text, image_token_index=50265)


@pytest.mark.parametrize("size", PUBLISHED)
def test_every_tensor_has_one_place(size: str):
    config = published_config(size)
    with torch.device("meta"):
        module = Blip2ForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    del shapes[TIED_HEAD]
    graphdef, params = build_abstract(Model, config, dtype=jnp.bfloat16)
    abstract = flatten_params(params)
    for unread in ((), UNREAD):
        tensors = [
            StoredTensor(name, "model.safetensors", shape, "BF16", None)
            for name, shape in (shapes | dict.fromkeys(unread, (1,))).items()
        ]
        # Reports what is missing, unexpected or misshapen, and two tensors for one place.
        sources = match_tensors(tensors, abstract, Model.rules(config), source=size)
        assert {tensor.name for tensor in sources.values()} == shapes.keys()
    total = sum(int(np.prod(leaf.shape)) for leaf in abstract.values())
    assert total == pytest.approx(NUM_PARAMETERS[size], rel=0.01)

    width = config.text_config.hidden_size
    pixels = jax.ShapeDtypeStruct((2, 3, 224, 224), jnp.float32)
    rows = jax.eval_shape(lambda p, x: bind(graphdef, p).embed_multimodal(x), params, pixels)
    assert (rows.shape, rows.dtype) == ((2, 32, width), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((4, width), jnp.bfloat16)
    logits = jax.eval_shape(lambda p, x: bind(graphdef, p).compute_logits(x), params, hidden)
    assert (logits.shape, logits.dtype) == ((4, 50304), jnp.float32)
