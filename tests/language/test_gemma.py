"""Gemma 3's decoder against HF's text-only model: the states after every block, and the logits."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from mmjax.errors import CheckpointError
from mmjax.language.gemma import GemmaConfig, GemmaTextModel
from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind, build_abstract
from mmjax.parity.arrays import record
from mmjax.parity.reference import run_reference
from mmjax.weights.rules import Rule
from tests.kit import fill_by_name
from tests.oracle import assert_close, params_of

RULES = (Rule(r"^lm_head\..*", None), Rule(r"^model\.", ""))

TINY = {
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True},
    "linear rope": {"rope_parameters": LINEAR},
    "heads wider than the model": {"head_dim": 24, "num_attention_heads": 2},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "window of one": {"sliding_window": 1},
    "window beyond the prompt": {"sliding_window": 100},
    "only sliding": {"layer_types": ["sliding_attention"] * 4},
    "only global": {"layer_types": ["full_attention"] * 4},
    "another scale": {"query_pre_attn_scalar": 21},
    "capped logits": {"final_logit_softcapping": 1.5},
    "capped scores": {"attn_logit_softcapping": 0.7},
    "coarse eps": {"rms_norm_eps": 1e-2},
    "silu": {"hidden_activation": "silu"},
}


def reference_states(config: Any, model: Any, token_ids: np.ndarray) -> dict[str, np.ndarray]:
    inputs: dict[str, Any] = {"input_ids": torch.tensor(token_ids, dtype=torch.long)[None]}
    if config.attn_logit_softcapping is not None:
        # NOTE: HF's Gemma 3 keeps this key and forgets to pass it on; eager attention takes it.
        inputs["softcap"] = config.attn_logit_softcapping
    states = run_reference(model, inputs, RULES)
    return {name: value if name == "logits" else value[0] for name, value in states.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_state_is_hfs(name: str):
    config = Gemma3TextConfig(**{**TINY, **CONFIGS[name]})
    config._attn_implementation = "eager"
    reference = Gemma3ForCausalLM(config).eval()
    fill_by_name(reference)
    token_ids = np.random.default_rng(0).integers(0, 130, 40).astype(np.int32)
    expected = reference_states(config, reference, token_ids)

    graphdef, abstract = build_abstract(
        GemmaTextModel, GemmaConfig.from_hf(config), is_tied=True, dtype=jnp.float32
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

    assert len(expected) == 4 + 2
    assert_close(jax.device_get(run(params, token_ids, metadata)), expected, atol=1e-5)


def test_the_embedding_scale_is_rounded_to_the_dtype():
    config = GemmaConfig.from_hf(Gemma3TextConfig(**{**TINY, "hidden_size": 40}))
    graphdef, abstract = build_abstract(GemmaTextModel, config, is_tied=True, dtype=jnp.bfloat16)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), abstract)
    embeds = bind(graphdef, params).embed_input_ids(jnp.zeros(1, jnp.int32))
    assert float(embeds[0, 0]) == 6.3125  # sqrt(40) = 6.3246 has no bfloat16


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"use_bidirectional_attention": True}, "an encoder, not a generator"),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], match: str):
    plain = Gemma3TextConfig(**TINY)
    names = [*GemmaConfig.__dataclass_fields__, "use_bidirectional_attention"]
    settings = {name: getattr(plain, name) for name in names}
    with pytest.raises(CheckpointError, match=match):
        GemmaConfig.from_hf(SimpleNamespace(**{**settings, **changes}))
