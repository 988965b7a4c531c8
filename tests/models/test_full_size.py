"""Gemma 3 at its published sizes, without weights: every tensor of a checkpoint has one place.

Names and shapes come from HF's module on torch's meta device, told as both file layouts do.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration as Model
from mmjax.weights.load import match_tensors
from mmjax.weights.safetensors import StoredTensor

VISION = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
TEXT = {
    "model_type": "gemma3_text",
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "12b": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
    "27b": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}
"""What the hub's config.json files say; the rest are defaults, as there."""

NUM_PARAMETERS = {"4b": 4.3e9, "12b": 12.2e9, "27b": 27.4e9}

LAYOUTS = {
    "hub": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
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


def published_config(size: str) -> Any:
    return Gemma3Config(
        text_config={**TEXT, **PUBLISHED[size]}, vision_config=VISION, mm_tokens_per_image=256
    )


@pytest.fixture(scope="module", params=PUBLISHED)
def size(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def abstract(size: str) -> dict[str, Any]:
    """Our tree, flat."""
    return flatten_params(build_abstract(Model, published_config(size), dtype=jnp.bfloat16)[1])


@pytest.fixture(scope="module")
def shapes(size: str) -> dict[str, tuple[int, ...]]:
    """HF's names and shapes, without the tied head."""
    with torch.device("meta"):
        module = Gemma3ForConditionalGeneration(published_config(size))
    found = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    del found["lm_head.weight"]
    return found


def tell(name: str, layout: str) -> str:
    """Return the name that a file of `layout` has for the module's tensor `name`."""
    for old, new in LAYOUTS[layout].items():
        if name.startswith(old):
            # HF's module may carry the tower's inner name already.
            return new + name.removeprefix(old).removeprefix("vision_model.")
    return name


def stored(shapes: dict[str, tuple[int, ...]], layout: str) -> list[StoredTensor]:
    return [
        StoredTensor(tell(name, layout), "model.safetensors", shape, "BF16", None)
        for name, shape in shapes.items()
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_used_once_and_none_is_left_over(
    abstract: dict[str, Any], shapes: dict[str, tuple[int, ...]], layout: str
):
    tensors = stored(shapes, layout)
    # Reports what is missing, unexpected or misshapen, and two tensors for one place.
    sources = match_tensors(tensors, abstract, Model.rules(None), source=layout)
    assert sources.keys() == abstract.keys()
    assert len({tensor.name for tensor in sources.values()}) == len(tensors)


def test_the_size_is_the_published_one(size: str, abstract: dict[str, Any]):
    total = sum(int(np.prod(leaf.shape)) for leaf in abstract.values())
    assert total == pytest.approx(NUM_PARAMETERS[size], rel=0.01)


def test_a_picture_and_a_step_have_their_shapes(size: str):
    config = published_config(size)
    width = config.text_config.hidden_size
    graphdef, params = build_abstract(Model, config, dtype=jnp.bfloat16)
    pixels = jax.ShapeDtypeStruct((2, 3, 896, 896), jnp.float32)
    rows = jax.eval_shape(lambda p, x: bind(graphdef, p).embed_multimodal(x), params, pixels)
    assert (rows.shape, rows.dtype) == ((2, 256, width), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((4, width), jnp.bfloat16)
    logits = jax.eval_shape(lambda p, x: bind(graphdef, p).compute_logits(x), params, hidden)
    assert (logits.shape, logits.dtype) == ((4, 262208), jnp.float32)


def test_the_layers_alternate_as_published(size: str):
    config = published_config(size)
    kinds = config.text_config.layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == list(
        range(5, config.text_config.num_hidden_layers, 6)
    )
    rope = config.text_config.rope_parameters
    assert rope["full_attention"]["factor"] == 8.0
    assert rope["sliding_attention"]["rope_theta"] == 10_000.0
