"""Qwen3's decoder against HF's text-only model: the states after every block, and the logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mmjax.language.llama import LlamaConfig, LlamaTextModel
from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind, build_abstract
from mmjax.parity.arrays import record
from mmjax.parity.reference import run_reference
from mmjax.weights.rules import Rule
from tests.models.families.internvl import TEXT
from tests.oracle import assert_close, fill_with_unit_norms, params_of

CONFIGS: dict[str, dict[str, Any]] = {
    "heads narrower than the model": {"head_dim": 4},
    "biases, tied, a window": {
        "head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "rms_norm_eps": 1e-2,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_state_is_hfs(name: str):
    config = Qwen3Config(**{**TEXT, **CONFIGS[name]})
    reference = Qwen3ForCausalLM(config).eval()
    fill_with_unit_norms(reference)
    is_tied = config.tie_word_embeddings
    rules = (*[Rule(r"^lm_head\.", None)] * is_tied, Rule(r"^model\.", ""))
    token_ids = np.random.default_rng(0).integers(0, 128, 40).astype(np.int32)
    inputs = {"input_ids": torch.tensor(token_ids, dtype=torch.long)[None]}
    expected = {
        key: value if key == "logits" else value[0]
        for key, value in run_reference(reference, inputs, rules).items()
    }
    assert len(expected) == 2 + 2

    text = LlamaConfig.from_hf(config)
    assert text.windows == (None, 5 if is_tied else None)
    graphdef, abstract = build_abstract(LlamaTextModel, text, is_tied=is_tied, dtype=jnp.float32)
    params = params_of(reference, abstract, rules)
    places = jnp.arange(len(token_ids), dtype=jnp.int32)
    metadata = DenseAttentionMetadata(places[None], (places[None] <= places[:, None])[None])

    @jax.jit
    def run(params: Any, token_ids: Any, metadata: Any) -> dict[str, Any]:
        model = bind(graphdef, params)
        positions = jnp.broadcast_to(metadata.token_index, (3, len(token_ids)))
        with record(model) as outputs:
            hidden, _ = model(model.embed_input_ids(token_ids), positions, None, metadata)
        return outputs | {"logits": model.compute_logits(hidden)}

    assert_close(jax.device_get(run(params, token_ids, metadata)), expected, atol=1e-5)
