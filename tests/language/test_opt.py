"""OPT's decoder against HF's text-only model: the states after every block, and the logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import OPTConfig as HFConfig
from transformers import OPTForCausalLM

from mmjax.language.opt import OPTConfig, OPTTextModel
from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind, build_abstract
from mmjax.parity.arrays import record
from mmjax.parity.reference import run_reference
from mmjax.weights.rules import Rule
from tests.models.families.blip2 import TEXT
from tests.oracle import assert_close, fill_with_unit_norms, params_of

RULES = (
    Rule(r"^model\.decoder\.final_layer_norm\.", "norm."),
    Rule(r"^model\.decoder\.", ""),
)
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no biases, a head of its own": {"enable_bias": False, "tie_word_embeddings": False},
    "narrow embeddings, norms behind": {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "wide embeddings, no last norm": {
        "word_embed_proj_dim": 40,
        "_remove_final_layer_norm": True,
        "activation_function": "gelu",
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_state_is_hfs(name: str):
    config = HFConfig(**{**TEXT, **CONFIGS[name]})
    reference = OPTForCausalLM(config).eval()
    fill_with_unit_norms(reference)
    token_ids = np.random.default_rng(0).integers(3, 128, 20).astype(np.int32)
    inputs = {"input_ids": torch.tensor(token_ids, dtype=torch.long)[None]}
    expected = {
        key: value if key == "logits" else value[0]
        for key, value in run_reference(reference, inputs, RULES).items()
    }

    graphdef, abstract = build_abstract(
        OPTTextModel,
        OPTConfig.from_hf(config),
        is_tied=config.tie_word_embeddings,
        dtype=jnp.float32,
    )
    params = params_of(reference, abstract, RULES)
    places = jnp.arange(len(token_ids), dtype=jnp.int32)
    metadata = DenseAttentionMetadata(places[None], (places[None] <= places[:, None])[None])

    @jax.jit
    def run(params: Any, token_ids: Any, metadata: Any) -> dict[str, Any]:
        model = bind(graphdef, params)
        positions = jnp.broadcast_to(metadata.token_index, (3, len(token_ids)))
        with record(model) as outputs:
            hidden, _ = model(model.embed_input_ids(token_ids), positions, None, metadata)
        return outputs | {"logits": model.compute_logits(hidden)}

    has_norm = name in ("plain", "no biases, a head of its own")
    assert len(expected) == 2 + has_norm + 1
    assert_close(jax.device_get(run(params, token_ids, metadata)), expected, atol=1e-5)
