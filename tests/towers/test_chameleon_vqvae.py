"""Chameleon's VQ-VAE against HF's: the latents, and every code."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import ChameleonVQVAE as HFModel
from transformers import ChameleonVQVAEConfig as HFConfig

from mmjax.errors import CheckpointError
from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.towers.chameleon_vqvae import ChameleonVQVAE, ChameleonVQVAEConfig, Quantizer
from mmjax.weights.rules import Rule
from tests.kit import fill_by_name
from tests.oracle import TOLERANCE, params_of

RULES = (Rule(r"^post_quant_conv\..*", None),)
TINY: dict[str, Any] = {
    "embed_dim": 12,
    "num_embeddings": 50,
    "latent_channels": 16,
    "resolution": 16,
    "base_channels": 32,
    "channel_multiplier": [1, 2],
    "num_res_blocks": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three levels of two blocks": {"channel_multiplier": [1, 1, 2], "num_res_blocks": 2},
    "attention at a level, odd sides": {"attn_resolutions": [9], "resolution": 18},
    "no attention, grey pictures": {"attn_type": "none", "in_channels": 1},
}


@pytest.mark.parametrize(
    "name",
    # The others have all that the plain one has.
    [pytest.param(one, marks=pytest.mark.slow if one == "plain" else ()) for one in CONFIGS],
)
def test_latents_and_codes_are_hfs(name: str):
    config = HFConfig(**{**TINY, **CONFIGS[name]})
    reference: Any = HFModel(config).eval()
    fill_by_name(reference)
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter += 1.0
    shape = (3, config.in_channels, config.resolution, config.resolution)
    pixels = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    with torch.no_grad():
        latents = reference.quant_conv(reference.encoder(torch.tensor(pixels))).numpy()
        codes = reference.encode(torch.tensor(pixels), return_dict=True).image_tokens.numpy()
    assert len(set(codes.tolist())) > 10, "one code would be found by any quantiser"

    graphdef, abstract = build_abstract(ChameleonVQVAE, ChameleonVQVAEConfig.from_hf(config))
    params = params_of(reference, abstract, RULES)

    @jax.jit
    def run(params: Any, pixels: Any) -> tuple[Any, Any]:
        model = bind(graphdef, params)
        return model.quant_conv(model.encoder(pixels)), model(pixels)

    ours, our_codes = jax.device_get(run(params, pixels))
    np.testing.assert_allclose(ours, latents, atol=TOLERANCE)
    np.testing.assert_array_equal(our_codes.reshape(-1), codes)


def test_of_equal_codes_the_first_is_taken():
    config = ChameleonVQVAEConfig.from_hf(HFConfig(**TINY))
    graphdef, abstract = build_abstract(Quantizer, config)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), abstract)
    codes = bind(graphdef, params)(jnp.ones((2, 3, 12)))
    np.testing.assert_array_equal(codes, np.zeros((2, 3)))


def test_all_parameters_are_float32():
    config = ChameleonVQVAEConfig.from_hf(HFConfig(**TINY))
    leaves = flatten_params(build_abstract(ChameleonVQVAE, config)[1]).values()
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"double_latent": True}, r"`vq_config\.double_latent` is true"),
        ({"attn_type": "linear"}, r"`vq_config\.attn_type` is `linear`; mmjax knows `vanilla`"),
        ({"base_channels": 48}, r"`vq_config\.base_channels` is 48; it must be a multiple of 32"),
    ],
)
def test_what_the_encoder_cannot_be_is_refused(changes: dict[str, Any], words: str):
    with pytest.raises(CheckpointError, match=words):
        ChameleonVQVAEConfig.from_hf(HFConfig(**{**TINY, **changes}))
