"""Persimmon's decoder against HF's: the states after every block, and the logits."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import PersimmonConfig as HFConfig
from transformers import PersimmonForCausalLM

from mmjax.errors import CheckpointError
from mmjax.language.persimmon import PersimmonConfig, PersimmonTextModel
from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind, build_abstract
from mmjax.parity.arrays import record
from mmjax.parity.reference import run_reference
from mmjax.weights.rules import Rule, Split
from tests.kit import fill_by_name
from tests.oracle import assert_close, params_of

TINY: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def rope(kind: str, turned: float, **parameters: Any) -> dict[str, Any]:
    return {
        "rope_type": kind,
        "rope_theta": 25000.0,
        "partial_rotary_factor": turned,
        **parameters,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no norms of queries and keys": {"qk_layernorm": False},
    "heads that turn whole": {"rope_parameters": rope("default", 1.0)},
    "heads that turn by a quarter": {"rope_parameters": rope("default", 0.25)},
    "linear rope": {"rope_parameters": rope("linear", 0.5, factor=4.0)},
    "one head, coarse eps": {"num_attention_heads": 1, "layer_norm_eps": 1e-2},
    "tied, gelu": {"tie_word_embeddings": True, "hidden_act": "gelu"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_state_is_hfs(name: str):
    config = HFConfig(**{**TINY, **CONFIGS[name]})
    reference = PersimmonForCausalLM(config).eval()
    fill_by_name(reference)
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter += 1.0
    token_ids = np.random.default_rng(0).integers(0, 130, 40).astype(np.int32)
    parts = [rf"\1{part}_proj." for part in "qkv"]
    rules = (
        Split(r"^model\.(.*)query_key_value\.", parts, (48 // config.num_attention_heads,) * 3),
        Rule(r"^model\.final_layernorm\.", "norm."),
        Rule(r"^model\.", ""),
    )
    inputs = {"input_ids": torch.tensor(token_ids, dtype=torch.long)[None]}
    expected = run_reference(reference, inputs, rules)
    expected = {key: value if key == "logits" else value[0] for key, value in expected.items()}

    graphdef, abstract = build_abstract(
        PersimmonTextModel,
        PersimmonConfig.from_hf(config),
        is_tied=config.tie_word_embeddings,
        dtype=jnp.float32,
    )
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

    assert len(expected) == 3 + 2
    assert_close(jax.device_get(run(params, token_ids, metadata)), expected, atol=1e-5)


def test_heads_that_do_not_fill_the_width_are_refused():
    plain = HFConfig(**TINY)
    settings = {name: getattr(plain, name) for name in PersimmonConfig.__dataclass_fields__}
    with pytest.raises(CheckpointError, match=r"`hidden_size` is 48, .*`num_attention_heads`, 5"):
        PersimmonConfig.from_hf(SimpleNamespace(**{**settings, "num_attention_heads": 5}))


def test_an_activation_that_is_not_known_is_refused():
    config = PersimmonConfig.from_hf(HFConfig(**{**TINY, "hidden_act": "prelu"}))
    with pytest.raises(CheckpointError, match="activation `prelu` is unknown"):
        build_abstract(PersimmonTextModel, config, is_tied=False, dtype=jnp.float32)
