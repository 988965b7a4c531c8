"""InternViT against HF's: the states after every block."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import InternVLVisionConfig, InternVLVisionModel

from mmjax.errors import CheckpointError
from mmjax.layers.module import bind, build_abstract
from mmjax.parity.arrays import record
from mmjax.towers.internvit import InternViT, InternViTConfig, count_blocks
from mmjax.weights.rules import Rule
from tests.models.families.internvl import VISION
from tests.oracle import assert_close, fill_with_unit_norms, params_of

RULES = (
    Rule(r"^embeddings\.mask_token$", None),
    Rule(r"^embeddings\.patch_embeddings\.projection\.", "embeddings.patch_embeddings."),
    Rule(r"^encoder\.layer\.", "encoder.layers."),
)
CONFIGS: dict[str, dict[str, Any]] = {
    "300m": {"attention_bias": True, "use_mask_token": True},
    "6b": {"norm_type": "rms_norm", "use_qk_norm": True},
    "final norm, no positions": {
        "use_mean_pooling": False,
        "use_absolute_position_embeddings": False,
    },
    "rms norm before a layer norm, coarse eps": {
        "norm_type": "rms_norm",
        "use_mean_pooling": False,
        "use_qk_norm": True,
        "layer_norm_eps": 1e-2,
    },
    "pixels that fill no patch": {"image_size": 37, "hidden_act": "quick_gelu", "num_channels": 1},
}


def read(hf_config: Any) -> InternViTConfig:
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_channels")
    same = (*same, "layer_norm_eps", "hidden_act", "norm_type")
    return InternViTConfig(
        **{name: getattr(hf_config, name) for name in same},
        num_blocks=hf_config.num_hidden_layers,
        image_size=hf_config.image_size[0],
        patch_size=hf_config.patch_size[0],
        has_qkv_bias=hf_config.attention_bias,
        has_qk_norm=hf_config.use_qk_norm,
        qk_norm_eps=1e-6,
        has_position_table=hf_config.use_absolute_position_embeddings,
        has_final_norm=not hf_config.use_mean_pooling,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_state_is_hfs(name: str):
    config: Any = InternVLVisionConfig(**{**VISION, **CONFIGS[name]})
    reference = InternVLVisionModel(config).eval()
    fill_with_unit_norms(reference)
    shape = (2, config.num_channels, *config.image_size)
    pixels = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(pixels), output_hidden_states=True)
    states = [state.numpy() for state in expected.hidden_states]

    graphdef, abstract = build_abstract(InternViT, read(config), dtype=jnp.float32)
    params = params_of(reference, abstract, RULES)

    @jax.jit
    def run(params: Any, pixels: Any) -> dict[str, Any]:
        tower = bind(graphdef, params)
        with record(tower) as outputs:
            last = tower(pixels)
        return outputs | {"last": last}

    layers = {f"encoder.layers.{i}": state for i, state in enumerate(states[1:])}
    assert_close(
        jax.device_get(run(params, pixels)),
        {"embeddings": states[0], **layers, "last": expected.last_hidden_state.numpy()},
        atol=5e-6,
    )


def test_an_unknown_norm_is_refused():
    config: Any = InternVLVisionConfig(**VISION)
    config.norm_type = "batch_norm"
    with pytest.raises(CheckpointError, match=r"norm_type.*batch_norm"):
        read(config)


def test_states_count_from_both_ends():
    counts = [count_blocks(layer, 3, name="select_layer") for layer in range(-4, 4)]
    assert counts == [0, 1, 2, 3, 0, 1, 2, 3]
    for layer in (-5, 4, [1, 2], None, 1.0):
        with pytest.raises(CheckpointError, match="select_layer"):
            count_blocks(layer, 3, name="select_layer")
