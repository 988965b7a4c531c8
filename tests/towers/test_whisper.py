"""Whisper's encoder against HF's three classes of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    Qwen2AudioEncoderConfig,
    VoxtralEncoder,
    VoxtralEncoderConfig,
    WhisperConfig,
)
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.whisper.modeling_whisper import WhisperEncoder as HFWhisperEncoder

from mmjax.layers.module import bind, build_abstract
from mmjax.towers.whisper import WhisperEncoder, WhisperEncoderConfig
from tests.oracle import assert_close, fill_with_unit_norms, params_of

TINY: dict[str, Any] = {
    **{"num_mel_bins": 6, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2},
    **{"encoder_ffn_dim": 40, "max_source_positions": 11},
}
VOXTRAL: dict[str, Any] = {
    **{"num_mel_bins": 6, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 40, "max_source_positions": 11},
}


@pytest.mark.parametrize(
    ("config", "reference_class", "pool_size", "num_keys"),
    [
        pytest.param(WhisperConfig(**TINY), HFWhisperEncoder, 1, None, id="whisper"),
        pytest.param(
            WhisperConfig(**TINY, activation_function="relu"), HFWhisperEncoder, 1, None, id="relu"
        ),
        pytest.param(VoxtralEncoderConfig(**VOXTRAL), VoxtralEncoder, 1, None, id="voxtral"),
        pytest.param(
            Qwen2AudioEncoderConfig(**TINY), Qwen2AudioEncoder, 2, [11, 4], id="qwen2-audio"
        ),
    ],
)
def test_the_states_are_hfs(
    config: Any, reference_class: Any, pool_size: int, num_keys: list[int] | None
):
    config._attn_implementation = "eager"
    reference = reference_class(config).eval()
    fill_with_unit_norms(reference, sharpness=3.0)
    features = np.random.default_rng(0).normal(size=(2, 6, 22)).astype(np.float32)
    mask = None
    if num_keys is not None:
        is_key = torch.arange(11)[None] < torch.tensor(num_keys)[:, None]
        mask = torch.where(is_key, 0.0, -torch.inf)[:, None, None].expand(2, 1, 11, 11)
    with torch.no_grad():
        expected = reference(torch.tensor(features), attention_mask=mask)[0]

    read = WhisperEncoderConfig.from_hf(config, pool_size=pool_size)
    graphdef, abstract = build_abstract(WhisperEncoder, read, dtype=jnp.float32)
    params = params_of(reference, abstract, ())
    lengths = None if num_keys is None else jnp.array(num_keys, jnp.int32)
    run = jax.jit(lambda params, x: bind(graphdef, params)(x, lengths))
    ours = {"states": np.asarray(run(params, features))}
    assert ours["states"].shape == (2, 11 // pool_size, 24)
    assert_close(ours, {"states": expected.numpy()}, atol=5e-6)
