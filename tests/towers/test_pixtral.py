"""Pixtral's tower against HF's: the states after every block, of pictures of several sizes."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import PixtralVisionConfig, PixtralVisionModel

from mmjax.errors import CheckpointError
from mmjax.layers.module import bind, build_abstract
from mmjax.models.pixtral.host_inputs import cut_patches
from mmjax.models.pixtral.model import PixtralForConditionalGeneration
from mmjax.towers.packed_vit import PackedViT, PackedViTConfig
from tests.oracle import assert_close, fill_with_unit_norms, params_of

TINY: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 64, "patch_size": 4, "hidden_act": "silu"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "an odd number of frequencies": {"hidden_size": 20},
    "gelu, one channel, another theta": {
        "hidden_act": "gelu",
        "num_channels": 1,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
    },
}
SIZES = [(12, 40), (4, 4), (20, 16)]
"""Heights and widths."""
NUM_PADDING = 7


@pytest.mark.parametrize("name", CONFIGS)
def test_every_state_is_hfs(name: str):
    config = PixtralVisionConfig(**{**TINY, **CONFIGS[name]})
    config._attn_implementation = "eager"
    reference = PixtralVisionModel(config).eval()
    fill_with_unit_norms(reference)
    generator = np.random.default_rng(0)
    whole = np.zeros((len(SIZES), config.num_channels, 20, 40), np.float32)
    units = []
    for picture, (height, width) in zip(whole, SIZES, strict=True):
        picture[:, :height, :width] = generator.normal(size=(len(picture), height, width))
        units.append(cut_patches(picture[:, :height, :width], 4))
    with torch.no_grad():
        expected = reference(
            torch.tensor(whole), image_sizes=torch.tensor(SIZES), output_hidden_states=True
        )

    graphdef, abstract = build_abstract(
        PackedViT, PackedViTConfig.from_hf(config), dtype=jnp.float32
    )
    wrapper = SimpleNamespace(vision_config=config, vision_feature_layer=-1)
    rules = PixtralForConditionalGeneration.rules(wrapper)
    whole_model = torch.nn.ModuleDict({"vision_tower": reference})
    params = params_of(whole_model, {"vision_tower": abstract}, rules)["vision_tower"]
    ids = np.repeat(np.arange(len(SIZES), dtype=np.int32), [len(u["places"]) for u in units])
    padding = {
        "pixel_values": np.full((NUM_PADDING, 16 * config.num_channels), 3.0, np.float32),
        "places": np.zeros((NUM_PADDING, 2), np.int32),
    }
    pack = {key: np.concatenate([*(u[key] for u in units), padding[key]]) for key in padding}
    layers = range(config.num_hidden_layers + 1)
    run = jax.jit(
        lambda params, pack, ids: bind(graphdef, params)(
            **pack, segment_ids=ids, feature_layers=layers
        )
    )
    ids = np.append(ids, np.full(NUM_PADDING, -1, np.int32))
    last, states = run(params, pack, ids)
    assert np.isfinite(last).all()
    ours = {"last": np.asarray(last), **{str(i): np.asarray(x) for i, x in enumerate(states)}}
    assert_close(
        {key: value[None, :-NUM_PADDING] for key, value in ours.items()},
        {
            "last": expected.last_hidden_state.numpy(),
            **{str(i): x.numpy() for i, x in enumerate(expected.hidden_states)},
        },
        atol=5e-6,
    )


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}, r"rope_type` is `yarn`"),
        ("patch_size", [16, 14], r"`vision_config.patch_size` is \[16, 14\]; .* square"),
    ],
)
def test_what_cannot_be_served_is_refused(name: str, value: Any, match: str):
    config = PixtralVisionConfig(**TINY)
    object.__setattr__(config, name, value)
    with pytest.raises(CheckpointError, match=match):
        PackedViTConfig.from_hf(config)
