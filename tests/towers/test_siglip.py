"""SigLIP against HF's: the states after every block."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import SiglipVisionConfig, SiglipVisionModel

from mmjax.layers.module import bind, build_abstract
from mmjax.layers.vision import VisionConfig
from mmjax.towers.siglip import SiglipVisionTower
from mmjax.weights.rules import Rule
from tests.kit import fill_by_name
from tests.oracle import assert_close, params_of

RULES = (Rule(r"^(vision_model\.)?head\..*", None), Rule(r"^vision_model\.", ""))

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with a head that is not used": {"vision_use_head": True},
    "picture no multiple of the patch": {"image_size": 37, "patch_size": 8},
    "exact gelu": {"hidden_act": "gelu"},
    "one channel, coarse eps": {"num_channels": 1, "layer_norm_eps": 1e-2},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_state_is_hfs(name: str):
    settings: dict[str, Any] = {
        **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3},
        **{"num_attention_heads": 2, "image_size": 32, "patch_size": 8, "vision_use_head": False},
        **CONFIGS[name],
    }
    config = SiglipVisionConfig(**settings)
    reference = SiglipVisionModel(config).eval()
    fill_by_name(reference)
    side = settings["image_size"]
    shape = (2, settings.get("num_channels", 3), side, side)
    pixels = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(pixels), output_hidden_states=True)

    graphdef, abstract = build_abstract(
        SiglipVisionTower, VisionConfig.from_hf(config), dtype=jnp.float32
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
