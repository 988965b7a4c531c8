"""CLIP against HF's: the states after every block."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from mmjax.errors import CheckpointError
from mmjax.layers.module import bind, build_abstract
from mmjax.layers.vision import VisionConfig
from mmjax.towers.clip import ClipVisionTower
from mmjax.weights.rules import Rule
from tests.oracle import assert_close, fill_with_unit_norms, params_of

RULES = (Rule(r"^(vision_model\.)?post_layernorm\..*", None), Rule(r"^vision_model\.", ""))

TINY: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "image_size": 32, "patch_size": 8},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "picture no multiple of the patch": {"image_size": 37},
    "exact gelu": {"hidden_act": "gelu"},
    "one channel, coarse eps": {"num_channels": 1, "layer_norm_eps": 1e-2},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_state_is_hfs(name: str):
    settings = {**TINY, **CONFIGS[name]}
    config = CLIPVisionConfig(**settings)
    reference = CLIPVisionModel(config).eval()
    fill_with_unit_norms(reference)
    side = settings["image_size"]
    shape = (2, settings.get("num_channels", 3), side, side)
    pixels = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(pixels), output_hidden_states=True)

    graphdef, abstract = build_abstract(
        ClipVisionTower, VisionConfig.from_hf(config), dtype=jnp.float32
    )
    params = params_of(reference, abstract, RULES)
    layers = range(config.num_hidden_layers + 1)
    run = jax.jit(lambda params, x: bind(graphdef, params)(x, feature_layers=layers))
    last, states = run(params, pixels)
    assert_close(
        {"last": np.asarray(last), **{str(i): np.asarray(x) for i, x in enumerate(states)}},
        {
            "last": expected.last_hidden_state.numpy(),
            **{str(i): x.numpy() for i, x in enumerate(expected.hidden_states)},
        },
        atol=5e-6,
    )


@pytest.mark.parametrize("name", ["image_size", "patch_size"])
def test_pictures_that_are_not_square_are_refused(name: str):
    settings = CLIPVisionConfig(**TINY).to_dict() | {name: [32, 16]}
    with pytest.raises(CheckpointError, match=rf"`vision_config.{name}` is \[32, 16\]; .* square"):
        VisionConfig.from_hf(SimpleNamespace(**settings))
