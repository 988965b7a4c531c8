"""Every family of decoders against HF's text-only model: the states after every block, the logits.

One runner, and a table: a further decoder is a row of `DECODERS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTForCausalLM,
    PersimmonForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers import GemmaConfig as HFGemmaConfig
from transformers import LlamaConfig as HFLlamaConfig
from transformers import OPTConfig as HFOPTConfig
from transformers import PersimmonConfig as HFPersimmonConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mmjax.errors import CheckpointError
from mmjax.language.deepseek import DeepseekConfig, DeepseekTextModel
from mmjax.language.encoder_decoder.bart import BartConfig, BartDecoder
from mmjax.language.llama.config import LlamaConfig
from mmjax.language.llama.decoder import LlamaTextModel
from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind, build_abstract
from mmjax.layers.rope import attention_factor, inverse_frequencies
from mmjax.models.text_model import text_rules
from mmjax.parity.arrays import record
from mmjax.parity.reference import run_reference
from mmjax.weights.rules import Rule, RuleTypes, Split
from tests.families.blip2 import TEXT as OPT
from tests.families.internvl import TEXT as QWEN3
from tests.kit import fill_by_name
from tests.oracle import assert_close, fill_with_unit_norms, params_of

LLAMA: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
GEMMA = LLAMA | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
LATENT: dict[str, Any] = {
    **{name: size for name, size in LLAMA.items() if name != "num_key_value_heads"},
    **{"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8},
    **{"v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
"""Queries, keys and values of latents; experts behind the first layer."""
PERSIMMON: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LLAMA4: dict[str, Any] = {
    **LLAMA,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "attention_chunk_size": 7,
    "floor_scale": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
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
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
MISTRAL4_YARN = {
    **{**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1},
    **{"mscale": 1.0, "mscale_all_dim": 1.0},
}
"""Queries grow at every 16th position."""
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128},
    **{"short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [2.0, 4.0, 8.0, 16.0]},
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def persimmon_rope(kind: str, turned: float, **parameters: Any) -> dict[str, Any]:
    own = {"rope_type": kind, "rope_theta": 25000.0, "partial_rotary_factor": turned}
    return {"rope_parameters": own | parameters}


def own_rules(config: Any) -> tuple[RuleTypes, ...]:
    """Return a decoder's rules as if its tree stood alone."""
    rules = [*text_rules(config), Rule(r"^model\.(decoder\.)?", "language_model.")]
    if config.model_type == "opt":
        rules.insert(0, Rule(r"^model\.decoder\.final_layer_norm\.", "language_model.norm."))
    return tuple(_without_prefix(rule) for rule in rules)


def _without_prefix(rule: Any) -> RuleTypes:
    def cut(name: str) -> str:
        return name.removeprefix("language_model.")

    if isinstance(rule, Split):
        return replace(rule, replacements=[cut(name) for name in rule.replacements])
    return replace(rule, replacement=cut(rule.replacement))


def fill_experts(model: Any) -> None:
    """Fill a model whose routers prefer some experts, as trained ones do."""
    fill_with_unit_norms(model)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.5)


def no_prefix(config: Any) -> tuple[RuleTypes, ...]:
    del config
    return (Rule(r"^model\.", ""),)


SLOW_CONFIGS = {
    # What these vary, other rows of the same class of ours vary by default.
    ("gemma3", "heads wider than the model"),  # llama, wide heads
    ("gemma3", "as many key heads"),  # llama's
    ("gemma3", "window beyond the prompt"),  # plain
    ("gemma3", "only sliding"),  # plain has both kinds of layers
    ("gemma3", "only global"),
    ("gemma3", "silu"),  # llama, plain
    ("gemma3", "coarse eps"),  # llama, one key head, coarse eps
    ("gemma3", "another scale"),  # granite's multipliers
    ("gemma3", "one key head"),  # gemma's, and llama's
    ("gemma3", "linear rope"),  # llama's
    ("gemma3", "window of one"),  # mistral's
    ("gemma2", "no caps"),  # gemma3, plain
    ("gemma2", "biases"),  # gemma3, biases
    ("llama", "gelu"),  # persimmon, tied, gelu
    ("llama", "as many key heads"),  # persimmon's, and opt's
    ("llama", "tied"),  # gemma's, and qwen2, tied
    ("qwen2", "sliding layers"),  # gemma3, plain
    ("qwen2", "yarn rope"),  # llama, yarn rope
    ("persimmon", "heads that turn whole"),  # llama's
    ("persimmon", "linear rope"),  # llama's
    ("cohere2", "linear rope"),  # llama's
}
"""By names of a decoder and of a configuration; a program is compiled for each."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A class of HF's, ours of the same mathematics, and the configurations to compare them at."""

    name: str
    hf_classes: tuple[Any, Any]
    """Config and model."""
    config_class: Any = LlamaConfig
    model_class: Any = LlamaTextModel
    tiny: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    """What differs from `tiny`."""
    rules: Callable[[Any], tuple[RuleTypes, ...]] = no_prefix
    fill: Callable[[Any], None] = fill_with_unit_norms

    def hf_config(self, changes: Mapping[str, Any]) -> Any:
        config = self.hf_classes[0](**{**self.tiny, **changes})
        config._attn_implementation = "eager"
        return config


DECODERS = (
    Decoder(
        name="gemma3",
        hf_classes=(Gemma3TextConfig, Gemma3ForCausalLM),
        tiny=GEMMA,
        fill=fill_by_name,
        configs={
            "plain": {},
            "biases": {"attention_bias": True},
            "linear rope": {"rope_parameters": GEMMA_ROPE},
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
        },
    ),
    Decoder(
        name="gemma2",
        hf_classes=(Gemma2Config, Gemma2ForCausalLM),
        tiny=GEMMA,
        fill=fill_by_name,
        configs={
            "plain": {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5},
            "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            "biases": {"attention_bias": True, "query_pre_attn_scalar": 21},
        },
    ),
    Decoder(
        name="gemma",
        hf_classes=(HFGemmaConfig, GemmaForCausalLM),
        tiny={**LLAMA, "head_dim": 16},
        fill=fill_by_name,
        configs={
            "plain": {},
            "one key head": {"num_key_value_heads": 1, "attention_bias": True},
            "the name of old for tanh": {"hidden_act": "gelu"},
        },
    ),
    Decoder(
        name="llama",
        hf_classes=(HFLlamaConfig, LlamaForCausalLM),
        tiny=LLAMA,
        configs={
            "plain": {},
            "tied": {"tie_word_embeddings": True},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "wide heads": {"head_dim": 24, "num_attention_heads": 2},
            "as many key heads": {"num_key_value_heads": 4},
            "one key head, coarse eps": {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
            "gelu": {"hidden_act": "gelu"},
            "a key of other classes": {"sliding_window": 5},
            "linear rope": {"rope_parameters": LINEAR},
            "llama3 rope": {"rope_parameters": LLAMA3},
            "yarn rope": {"rope_parameters": YARN},
            "dynamic rope": {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}},
        },
    ),
    Decoder(
        name="llama4",
        hf_classes=(Llama4TextConfig, Llama4ForCausalLM),
        tiny=LLAMA4,
        rules=own_rules,
        configs={
            "experts in every layer": {
                # The kind of Scout's: nothing is between the two waves.
                "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},
            },
            "experts in every second, no norms": {
                "interleave_moe_layer_step": 2,
                "use_qk_norm": False,
                "num_key_value_heads": 1,
                "rms_norm_eps": 1e-2,
            },
            "two experts, other layers without positions, as they are": {
                "num_experts_per_tok": 2,
                "moe_layers": [1, 2],
                "no_rope_layers": [0, 1, 1, 0],
                "attn_temperature_tuning": False,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
        },
    ),
    Decoder(
        name="mistral",
        hf_classes=(MistralConfig, MistralForCausalLM),
        tiny=LLAMA,
        configs={
            "no window": {"sliding_window": None, "head_dim": 16},
            "window": {"sliding_window": 9},
            "window of one": {"sliding_window": 1},
            "yarn with its factor": {
                "sliding_window": None,
                "rope_parameters": {**YARN, "attention_factor": 0.8},
            },
        },
    ),
    Decoder(
        name="qwen2",
        hf_classes=(Qwen2Config, Qwen2ForCausalLM),
        tiny=LLAMA,
        configs={
            "plain": {"sliding_window": 5},
            "tied": {"tie_word_embeddings": True},
            "sliding layers": {
                "use_sliding_window": True,
                "sliding_window": 7,
                "max_window_layers": 1,
            },
            "yarn rope": {
                "rope_parameters": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False}
            },
        },
    ),
    Decoder(
        name="qwen3",
        hf_classes=(Qwen3Config, Qwen3ForCausalLM),
        tiny=QWEN3,
        configs={
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
        },
    ),
    Decoder(
        name="hunyuan",
        hf_classes=(HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM),
        tiny={**LLAMA, "head_dim": 16},
        rules=own_rules,
        fill=partial(fill_with_unit_norms, sharpness=1.4),
        configs={
            "longer prompts, biases, tied": {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 1e4,
                    "alpha": 1000.0,
                    "factor": 1.0,
                },
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
            "plain angles": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        },
    ),
    Decoder(
        name="cohere",
        hf_classes=(CohereConfig, CohereForCausalLM),
        tiny=LLAMA,
        configs={
            "plain": {},
            "biases, logits as they are, coarse eps, a head of its own": {
                "attention_bias": True,
                "logit_scale": 1.0,
                "layer_norm_eps": 1e-2,
                "tie_word_embeddings": False,
            },
        },
    ),
    Decoder(
        name="cohere2",
        hf_classes=(Cohere2Config, Cohere2ForCausalLM),
        tiny=LLAMA,
        configs={
            "three with a window, one without positions": {
                "num_hidden_layers": 4,
                "sliding_window": 9,
                "logit_scale": 0.25,
            },
            "nowhere positions": {"layer_types": ["full_attention"] * 3},
            "linear rope": {"rope_parameters": LINEAR, "attention_bias": True},
        },
    ),
    Decoder(
        name="exaone4",
        hf_classes=(Exaone4Config, Exaone4ForCausalLM),
        tiny=LLAMA,
        rules=own_rules,
        configs={
            "three with a window, one without positions": {
                "num_hidden_layers": 4,
                "sliding_window": 9,
                "rope_parameters": LLAMA3,
                "head_dim": 16,
            },
            "no windows, everywhere positions": {
                "sliding_window": None,
                "layer_types": ["full_attention"] * 3,
                "rms_norm_eps": 1e-2,
                "tie_word_embeddings": True,
            },
        },
    ),
    Decoder(
        name="deepseek_v3",
        hf_classes=(DeepseekV3Config, DeepseekV3ForCausalLM),
        config_class=DeepseekConfig,
        model_class=DeepseekTextModel,
        tiny={**LATENT, "num_key_value_heads": 4},
        rules=own_rules,
        fill=fill_experts,
        configs={
            # Kimi K2's keys.
            "yarn of both kinds": {"rope_parameters": DEEPSEEK_YARN},
            "groups, whole queries, halves turned, no norm, coarse eps": {
                **{"n_group": 4, "topk_group": 2, "q_lora_rank": None, "rope_interleave": False},
                **{"norm_topk_prob": False, "rms_norm_eps": 1e-2, "n_shared_experts": 2},
            },
        },
    ),
    Decoder(
        name="granite",
        hf_classes=(GraniteConfig, GraniteForCausalLM),
        tiny=LLAMA,
        configs={
            "multipliers as in Granite 3": {
                "embedding_multiplier": 12,
                "attention_multiplier": 0.2,
                "residual_multiplier": 0.22,
                "logits_scaling": 8.0,
                "tie_word_embeddings": True,
            },
            "biases, what is added as it is": {
                "attention_bias": True,
                "mlp_bias": True,
                "attention_multiplier": 0.5,
            },
        },
    ),
    Decoder(
        name="mistral4",
        hf_classes=(Mistral4Config, Mistral4ForCausalLM),
        config_class=DeepseekConfig,
        model_class=DeepseekTextModel,
        tiny={**LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 0},
        rules=own_rules,
        fill=fill_experts,
        configs={
            "queries that grow": {"rope_parameters": MISTRAL4_YARN, "routed_scaling_factor": 1.5}
        },
    ),
    Decoder(
        name="opt",
        hf_classes=(HFOPTConfig, OPTForCausalLM),
        config_class=BartConfig,
        model_class=BartDecoder,
        tiny=OPT,
        rules=own_rules,
        configs={
            "plain": {},
            "no biases, a head of its own": {"enable_bias": False, "tie_word_embeddings": False},
            "narrow embeddings, norms behind": {
                "word_embed_proj_dim": 16,
                "do_layer_norm_before": False,
            },
            "wide embeddings, no last norm": {
                "word_embed_proj_dim": 40,
                "_remove_final_layer_norm": True,
                "activation_function": "gelu",
            },
        },
    ),
    Decoder(
        name="persimmon",
        hf_classes=(HFPersimmonConfig, PersimmonForCausalLM),
        tiny=PERSIMMON,
        rules=own_rules,
        configs={
            "plain": {},
            "no norms of queries and keys": {"qk_layernorm": False},
            "heads that turn whole": persimmon_rope("default", 1.0),
            "heads that turn by a quarter": persimmon_rope("default", 0.25),
            "linear rope": persimmon_rope("linear", 0.5, factor=4.0),
            "one head, coarse eps": {"num_attention_heads": 1, "layer_norm_eps": 1e-2},
            "tied, gelu": {"tie_word_embeddings": True, "hidden_act": "gelu"},
        },
    ),
)
CASES = [
    pytest.param(
        decoder,
        changes,
        id=f"{decoder.name}, {name}",
        marks=pytest.mark.slow if (decoder.name, name) in SLOW_CONFIGS else (),
    )
    for decoder in DECODERS
    for name, changes in decoder.configs.items()
]


@pytest.mark.parametrize(("decoder", "changes"), CASES)
def test_every_state_is_hfs(decoder: Decoder, changes: Mapping[str, Any]):
    config = decoder.hf_config(changes)
    reference, rules = decoder.hf_classes[1](config).eval(), decoder.rules(config)
    decoder.fill(reference)
    token_ids = np.random.default_rng(0).integers(3, config.vocab_size, 40).astype(np.int32)
    inputs: dict[str, Any] = {"input_ids": torch.tensor(token_ids, dtype=torch.long)[None]}
    if decoder is GEMMA3 and config.attn_logit_softcapping is not None:
        # NOTE: HF's Gemma 3 keeps this key and forgets to pass it on; eager attention takes it.
        inputs["softcap"] = config.attn_logit_softcapping
    states = run_reference(reference, inputs, rules)
    expected = {key: value if key == "logits" else value[0] for key, value in states.items()}
    has_norm = not any(
        key in changes for key in ("do_layer_norm_before", "_remove_final_layer_norm")
    )
    assert len(expected) == config.num_hidden_layers + has_norm + 1

    is_tied = config.tie_word_embeddings
    graphdef, abstract = build_abstract(
        decoder.model_class,
        decoder.config_class.from_hf(config),
        is_tied=is_tied,
        dtype=jnp.float32,
    )
    params = params_of(reference, abstract, rules)
    assert ("lm_head" in params) == (not is_tied)
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


ROWS = {decoder.name: decoder for decoder in DECODERS}
GEMMA3, LLAMA_ROW = ROWS["gemma3"], ROWS["llama"]
QWEN3_ROW, PERSIMMON_ROW, COHERE_ROW = ROWS["qwen3"], ROWS["persimmon"], ROWS["cohere"]
DEEPSEEK_ROW, MISTRAL4_ROW = ROWS["deepseek_v3"], ROWS["mistral4"]
REFUSED = [
    (GEMMA3, {"use_bidirectional_attention": True}, "an encoder, not a generator"),
    (GEMMA3, {"layer_types": ["chunked_attention"]}, "chunked_attention"),
    (LLAMA_ROW, {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    (ROWS["llama4"], {"attention_chunk_size": None}, "chunked_attention"),
    (LLAMA_ROW, {"hidden_act": "mish"}, "activation `mish` is unknown; known: gelu"),
    (
        LLAMA_ROW,
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "is `longrope`, and 'short_factor' is not given",
    ),
    (
        LLAMA_ROW,
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0]}},
        "has 1 numbers; it must have 4",
    ),
    (
        LLAMA_ROW,
        {"rope_parameters": {"rope_type": "hadamard", "rope_theta": 1e4}},
        "`rope_type` is `hadamard`; mmjax knows `default`",
    ),
    (
        LLAMA_ROW,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        "'factor' is not given",
    ),
    (LLAMA_ROW, {"rope_parameters": {**LINEAR, "factor": None}}, "'factor' is not given"),
    (COHERE_ROW, {"rope_parameters": {**LONGROPE, "factor": None}}, "'factor' is not given"),
    (LLAMA_ROW, {"rope_parameters": {**LONGROPE, "mrope_section": [2, 1, 1]}}, "of one axis here"),
    (DEEPSEEK_ROW, {"rope_parameters": {**DEEPSEEK_YARN, "factor": None}}, "'factor' is not given"),
    (
        PERSIMMON_ROW,
        {"num_attention_heads": 5},
        "`num_attention_heads` is 5; it must divide `hidden_size`",
    ),
    (PERSIMMON_ROW, {"hidden_act": "prelu"}, "activation `prelu` is unknown"),
    (COHERE_ROW, {"use_qk_norm": True}, "`use_qk_norm` is true"),
    (
        ROWS["hunyuan"],
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
        "is `dynamic`, `alpha` None",
    ),
    (
        ROWS["hunyuan"],
        {
            "model_type": "hunyuan_vl_text",
            "rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
        "has four axes",
    ),
    (DEEPSEEK_ROW, {"scoring_func": "softmax"}, "`language_config.scoring_func` is 'softmax'"),
    (DEEPSEEK_ROW, {"q_lora_rank": 0}, "`language_config.q_lora_rank` is 0; latent attention"),
    (DEEPSEEK_ROW, {"attention_bias": True}, "`language_config.attention_bias` is True"),
    (
        DEEPSEEK_ROW,
        {"rope_parameters": LINEAR},
        "is of type `linear`; mmjax serves a `deepseek_v3`",
    ),
    (MISTRAL4_ROW, {"n_group": 2}, "`language_config.n_group` is 2"),
    (MISTRAL4_ROW, {"rope_parameters": YARN}, "lacks llama_4_scaling_beta, by which"),
    (
        MISTRAL4_ROW,
        {"rope_parameters": {**MISTRAL4_YARN, "partial_rotary_factor": 0.5}},
        "`partial_rotary_factor` is 0.5, of heads 20 wide, and `qk_rope_head_dim` 8",
    ),
]


@pytest.mark.parametrize(("decoder", "changes", "match"), REFUSED)
def test_what_cannot_be_served_is_refused(decoder: Decoder, changes: dict[str, Any], match: str):
    plain = decoder.hf_config({})
    names = {*decoder.config_class.__dataclass_fields__, *plain.to_dict()}
    settings = {name: getattr(plain, name) for name in names if hasattr(plain, name)} | changes

    def build() -> None:
        config = decoder.config_class.from_hf(SimpleNamespace(**settings))
        model = decoder.model_class(config, is_tied=True, dtype=jnp.float32)
        model.layer_inputs(jnp.zeros((3, 1), jnp.int32))

    with pytest.raises(CheckpointError, match=match):
        build()


@pytest.mark.parametrize("parameters", [YARN, LONGROPE], ids=lambda one: one["rope_type"])
def test_a_factor_that_is_left_out_is_that_of_the_lengths(parameters: dict[str, Any]):
    config = LLAMA_ROW.hf_config({"rope_parameters": {**parameters, "factor": None}})
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    ours = LlamaConfig.from_hf(config)
    found = inverse_frequencies(ours.rope_parameters, ours.head_dim)
    np.testing.assert_allclose(found, frequencies, rtol=1e-6)
    assert attention_factor(ours.rope_parameters) == pytest.approx(factor)


def test_gemmas_embedding_scale_is_rounded_to_the_dtype():
    config = LlamaConfig.from_hf(GEMMA3.hf_config({"hidden_size": 40}))
    graphdef, abstract = build_abstract(LlamaTextModel, config, is_tied=True, dtype=jnp.bfloat16)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), abstract)
    embeds = bind(graphdef, params).embed_input_ids(jnp.zeros(1, jnp.int32))
    assert float(embeds[0, 0]) == 6.3125  # sqrt(40) = 6.3246 has no bfloat16


def test_only_marked_layers_of_qwen3_have_a_window():
    for changes in QWEN3_ROW.configs.values():
        config = QWEN3_ROW.hf_config(changes)
        window = 5 if config.tie_word_embeddings else None
        assert LlamaConfig.from_hf(config).windows == (None, window)
