"""Qwen3-Omni's and Qwen3-ASR's encoder of sounds against HF's two, a clip at a time."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3ASREncoderConfig
from transformers.models.qwen3_asr.modeling_qwen3_asr import Qwen3ASREncoder
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from mmjax.layers.module import bind, build_abstract
from mmjax.processing.media.clip_windows import ClipWindows
from mmjax.towers.whisper import Qwen3AudioConfig, Qwen3AudioEncoder
from mmjax.weights.rules import Rule
from tests.oracle import assert_close, fill_with_unit_norms, params_of

TINY: dict[str, Any] = {
    **{"num_mel_bins": 10, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2},
    **{"encoder_ffn_dim": 40, "downsample_hidden_size": 4, "n_window_infer": 230},
}
"""Windows of two chunks of a hundred frames."""
RULES = (Rule(r"^proj[12]\.", None), Rule(r"^layers\.", "encoder_layers."))
LENGTHS = (519, 400, 207, 100, 99, 31, 1)
"""Frames: several windows, whole ones and parts; one chunk, and less."""


@cache
def make(config_class: Any, reference_class: Any, activation: str) -> tuple[Any, Any]:
    """Return HF's encoder, and what runs ours with its weights."""
    hf_config = config_class(**TINY, activation_function=activation)
    hf_config._attn_implementation = "eager"
    reference = reference_class(hf_config).eval()
    fill_with_unit_norms(reference, sharpness=3.0)
    config = Qwen3AudioConfig.from_hf(hf_config)
    graphdef, abstract = build_abstract(Qwen3AudioEncoder, config, dtype=jnp.float32)
    params = params_of(reference, abstract, RULES)
    return reference, jax.jit(lambda *inputs: bind(graphdef, params)(*inputs))


def run_reference(reference: Any, features: np.ndarray, chunk: int) -> np.ndarray:
    """Return HF's normed states of a clip."""
    states: list[torch.Tensor] = []
    hook = reference.ln_post.register_forward_hook(lambda *call: states.append(call[-1]))
    with torch.no_grad():
        if isinstance(reference, Qwen3ASREncoder):
            end = -features.shape[1] % chunk
            mask = np.pad(np.ones((1, features.shape[1]), np.int64), ((0, 0), (0, end)))
            padded = np.pad(features[None], ((0, 0), (0, 0), (0, end)))
            reference(torch.tensor(padded), torch.tensor(mask))
        else:
            reference(torch.tensor(features), torch.tensor([features.shape[1]]))
    hook.remove()
    return states[0].numpy()


@pytest.mark.parametrize(
    ("classes", "activation"),
    [
        ((Qwen3OmniMoeAudioEncoderConfig, Qwen3OmniMoeAudioEncoder), "gelu"),
        ((Qwen3ASREncoderConfig, Qwen3ASREncoder), "relu"),
    ],
    ids=["omni", "asr"],
)
def test_the_states_of_clips_are_hfs(classes: tuple[Any, Any], activation: str):
    """Qwen3-Omni's convolutions see no silence behind a clip of less than a chunk."""
    reference, run = make(*classes, activation)
    clips = ClipWindows(reference.config, pads_short=isinstance(reference, Qwen3ASREncoder))
    num_windows = max(LENGTHS) // clips.window_size + 1
    for number, length in enumerate(LENGTHS):
        features = np.random.default_rng(number).normal(size=(10, length)).astype(np.float32)
        windows, left, seen = clips.cut(features.T).values()
        missing = num_windows - len(windows)  # one program for all
        ours = run(
            np.pad(windows, ((0, missing), (0, 0), (0, 0))),
            np.pad(left, (0, missing)).astype(np.int32),
            np.pad(seen, (0, missing), mode="edge").astype(np.int32),
        )
        assert ours.shape == (num_windows, clips.num_rows, 24)
        found = np.asarray(ours).reshape(-1, 24)[: clips.count_rows(length)]
        expected = run_reference(reference, features, clips.chunk_size)
        assert_close({"states": found}, {"states": expected}, atol=5e-6)
