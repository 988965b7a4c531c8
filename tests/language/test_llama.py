"""Llama's decoder and its relatives against HF's: the states after every block, and the logits."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from mmjax.errors import CheckpointError
from mmjax.language.llama import LlamaConfig as OurConfig
from mmjax.language.llama import LlamaTextModel
from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind, build_abstract
from mmjax.parity.arrays import record
from mmjax.parity.reference import run_reference
from mmjax.weights.rules import Rule
from tests.oracle import assert_close, fill_with_unit_norms, params_of

RULES = (Rule(r"^model\.", ""),)

CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
TINY: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    "original_max_position_embeddings": 128,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 24, "num_attention_heads": 2}),
    "llama, as many key heads": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head, coarse eps": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama, dynamic rope": (
        "llama",
        {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}},
    ),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "mistral, window of one": ("mistral", {"sliding_window": 1}),
    "mistral, yarn with its factor": (
        "mistral",
        {"sliding_window": None, "rope_parameters": {**YARN, "attention_factor": 0.8}},
    ),
    "qwen2": ("qwen2", {"sliding_window": 5}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, sliding layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen2, yarn rope": (
        "qwen2",
        {"rope_parameters": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_state_is_hfs(name: str):
    kind, changes = CONFIGS[name]
    config_class, model_class = CLASSES[kind]
    config = config_class(**{**TINY, **changes})
    reference = model_class(config).eval()
    fill_with_unit_norms(reference)
    token_ids = np.random.default_rng(0).integers(0, 130, 40).astype(np.int32)
    inputs = {"input_ids": torch.tensor(token_ids, dtype=torch.long)[None]}
    states = run_reference(reference, inputs, RULES)
    expected = {key: value if key == "logits" else value[0] for key, value in states.items()}

    graphdef, abstract = build_abstract(
        LlamaTextModel,
        OurConfig.from_hf(config),
        is_tied=config.tie_word_embeddings,
        dtype=jnp.float32,
    )
    params = params_of(reference, abstract, RULES)
    assert ("lm_head" in params) == (not config.tie_word_embeddings)
    places = jnp.arange(len(token_ids), dtype=jnp.int32)
    metadata = DenseAttentionMetadata(places[None], (places[None] <= places[:, None])[None])

    @jax.jit
    def run(params: Any, token_ids: Any, metadata: Any) -> dict[str, Any]:
        model = bind(graphdef, params)
        positions = jnp.broadcast_to(metadata.token_index, (3, len(token_ids)))
        with record(model) as outputs:
            hidden, _ = model(model.embed_input_ids(token_ids), positions, None, metadata)
        return outputs | {"logits": model.compute_logits(hidden)}

    assert len(expected) == 3 + 2
    assert_close(jax.device_get(run(params, token_ids, metadata)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"hidden_act": "mish"}, "activation `mish` is unknown; known: gelu"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "is `longrope`"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'factor' is not given"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], match: str):
    settings = LlamaConfig(**TINY).to_dict() | {"model_type": "llama"} | changes

    def build() -> None:
        config = OurConfig.from_hf(SimpleNamespace(**settings))
        model = LlamaTextModel(config, is_tied=True, dtype=jnp.float32)
        model.layer_inputs(jnp.zeros((3, 1), jnp.int32))

    with pytest.raises(CheckpointError, match=match):
        build()
