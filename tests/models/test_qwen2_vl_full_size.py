"""Qwen2-VL and Qwen2.5-VL at published sizes, without weights: every tensor has one place.

Names and shapes come from HF's module on torch's meta device, told as the file layouts do.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mmjax.errors import CheckpointError
from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.models.interface import embed_units
from mmjax.models.qwen2_vl.host_inputs import Qwen25VLHostInputs
from mmjax.weights.load import match_tensors
from mmjax.weights.safetensors import StoredTensor
from tests.models.families.qwen2_vl import CLASSES, CONFIGS

SECTIONS = {"type": "mrope", "mrope_section": [16, 24, 24]}
TEXT_2B = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
TEXT_3B = {**TEXT_2B, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
TEXT_7B = {
    **TEXT_2B,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
TEXT_72B = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}
TEXT_32B = {**TEXT_72B, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
TEXT_32B["num_attention_heads"] = 40
VISION_2 = {"in_chans": 3, "spatial_patch_size": 14}
VISION_25 = {"hidden_size": 1280, "in_chans": 3, "spatial_patch_size": 14}
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool, float]] = {
    "Qwen2-VL-2B": ("qwen2_vl", TEXT_2B, {**VISION_2, "hidden_size": 1536}, True, 2.2e9),
    "Qwen2-VL-7B": ("qwen2_vl", TEXT_7B, {**VISION_2, "hidden_size": 3584}, False, 8.3e9),
    "Qwen2-VL-72B": ("qwen2_vl", TEXT_72B, {**VISION_2, "hidden_size": 8192}, False, 73.4e9),
    "Qwen2.5-VL-3B": (
        "qwen2_5_vl",
        TEXT_3B | {"num_attention_heads": 16},
        {**VISION_25, "out_hidden_size": 2048, "tokens_per_second": 2},
        True,
        3.75e9,
    ),
    "Qwen2.5-VL-7B": (
        "qwen2_5_vl",
        TEXT_7B,
        {**VISION_25, "out_hidden_size": 3584, "tokens_per_second": 2},
        False,
        8.3e9,
    ),
    "Qwen2.5-VL-32B": (
        "qwen2_5_vl",
        TEXT_32B,
        {**VISION_25, "out_hidden_size": 5120, "intermediate_size": 3456, "tokens_per_second": 2},
        False,
        33.5e9,
    ),
    "Qwen2.5-VL-72B": (
        "qwen2_5_vl",
        TEXT_72B,
        {**VISION_25, "out_hidden_size": 8192, "intermediate_size": 3456, "tokens_per_second": 2},
        False,
        73.4e9,
    ),
}
"""What the hub's config.json files say, the text's keys beside the others; whether tied; size."""

LAYOUTS = {
    "hub": {"model.visual.": "visual.", "model.language_model.": "model."},
    "module": {},
}


def published_config(name: str) -> Any:
    kind, text, vision, is_tied, _ = PUBLISHED[name]
    return CONFIGS[kind](
        **text,
        vision_config=dict(vision),
        rope_scaling=dict(SECTIONS),
        rope_theta=1e6,
        tie_word_embeddings=is_tied,
    )


def tell(name: str, layout: str) -> str:
    """Return the name that a file of `layout` has for the module's tensor `name`."""
    for old, new in LAYOUTS[layout].items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n.endswith(("32B", "72B")) else ())
        for n in PUBLISHED
    ],
)
def test_every_tensor_is_used_once_and_none_is_left_over(name: str):
    config = published_config(name)
    kind, text, _, is_tied, size = PUBLISHED[name]
    hf_class, model_class = CLASSES[kind]
    with torch.device("meta"):
        shapes = {key: tuple(t.shape) for key, t in hf_class(config).state_dict().items()}
    if is_tied:
        del shapes["lm_head.weight"]
    graphdef, params = build_abstract(model_class, config, dtype=jnp.bfloat16)
    abstract = flatten_params(params)
    for layout in LAYOUTS:
        tensors = [
            StoredTensor(tell(key, layout), "model.safetensors", shape, "BF16", None)
            for key, shape in shapes.items()
        ]
        # Reports what is missing, unexpected or misshapen, and two tensors for one place.
        sources = match_tensors(tensors, abstract, model_class.rules(config), source=layout)
        assert sources.keys() == abstract.keys()
        assert len({tensor.name for tensor in sources.values()}) == len(tensors)
    total = sum(int(np.prod(leaf.shape)) for leaf in abstract.values())
    assert total == pytest.approx(size, rel=0.01)

    spec = model_class.host_inputs(config).encoder_spec
    assert spec.inputs["pixel_values"] == ((1176,), "uint8")
    inputs = {
        key: jax.ShapeDtypeStruct((128, *shape), dtype)
        for key, (shape, dtype) in spec.inputs.items()
    }
    inputs["segment_ids"] = jax.ShapeDtypeStruct((128,), "int32")
    rows = jax.eval_shape(lambda p, x: embed_units(bind(graphdef, p), x), params, inputs)
    assert (rows.shape, rows.dtype) == ((32, text["hidden_size"]), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((4, text["hidden_size"]), jnp.bfloat16)
    logits = jax.eval_shape(lambda p, x: bind(graphdef, p).compute_logits(x), params, hidden)
    assert (logits.shape, logits.dtype) == ((4, text["vocab_size"]), jnp.float32)


def test_values_that_no_model_can_have():
    config = published_config("Qwen2.5-VL-3B")
    model_class = CLASSES["qwen2_5_vl"][1]

    def build() -> Any:
        return build_abstract(model_class, config, dtype=jnp.float32)

    config.vision_config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4}
    with pytest.raises(CheckpointError, match="rope_type` is `yarn`; expected `axial`"):
        build()
    config = published_config("Qwen2.5-VL-3B")
    config.vision_config.hidden_act = "mish"
    with pytest.raises(CheckpointError, match="`mish`"):
        build()
    config.vision_config.window_size = 14
    with pytest.raises(
        CheckpointError, match=r"`vision_config\.window_size` is 14, less than the 28"
    ):
        Qwen25VLHostInputs(config)
