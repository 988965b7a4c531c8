"""Llama's decoder (arXiv 2302.13971), and those that differ from it by a key of their config alone.

Mistral (a window, arXiv 2310.06825), the first Qwen (the base of its angles grows with the prompt,
and queries behind the trained length do; arXiv 2309.16609, section 2.3), Qwen2 (biases on queries,
keys and values; arXiv 2407.10671), Qwen2-VL's text model (three axes of positions; arXiv
2409.12191), Qwen3 (norms on queries and keys; arXiv 2505.09388), Qwen3-VL's (both; its larger ones
have experts; arXiv 2511.21631), Chameleon (other such norms, and in the 34B norms behind each half
of a block, as Swin v2's; arXiv 2405.09818), Molmo's Qwen2 and OLMo (the same, at full width; arXiv
2409.17146), Molmo 2's Qwen3 and OLMo 3 (rotary angles of two kinds; arXiv 2601.10611), Ministral 3
(queries that grow with their positions, as Llama 4's), PaddleOCR-VL's Ernie 4.5 (as Qwen2-VL's,
without biases; arXiv 2510.14528), GLM-4 (norms on both sides of attention and MLP, neighbours
rotated as pairs, a part of each head; its larger ones have experts, and neither of both; arXiv
2507.01006), Phi-3 (angles that longer prompts than the trained ones have of their own; arXiv
2404.14219), InternLM3 (Llama's by another name), gpt-oss (sinks, and experts with biases and a gate
of their own; arXiv 2508.10925), Command R and R7B (attention and MLP side by side behind one layer
norm, neighbours rotated as pairs, logits scaled; of R7B a layer that sees all tokens has no
positions, as in arXiv 2501.18795), Persimmon, which is Fuyu's (Adept, 2023: layer norms, a part of
each head turns, an MLP without a gate, of squared ReLU: Primer, arXiv 2109.08668), Gemma 1 (norms
with a centred weight, scaled embeddings; arXiv 2403.08295), 2 (norms on both sides, capped scores
and logits; 2408.00118) and 3 (norms on queries and keys, angles of two kinds; 2503.19786).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError, check_settings
from mmjax.layers.attention.api import AttentionMetadata
from mmjax.layers.attention.kv_cache import KVCache, KVCacheSpec
from mmjax.layers.attention.paged import apply_soft_cap
from mmjax.layers.decoder import (
    Decoder,
    GroupedQueryAttention,
    ParallelLayer,
    PostNormLayer,
    PreNormLayer,
    SandwichNormLayer,
    ScaledQueryAttention,
    read_kept_states,
)
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.mlp import MLP, GatedMLP
from mmjax.layers.module import call_block
from mmjax.layers.moe import ClampedGate, MixtureOfExperts, RouterConfig
from mmjax.layers.norm import GemmaRMSNorm, HeadNorm, LayerNorm, RMSNorm
from mmjax.layers.rope import text_angles
from mmjax.rounding import count_halvings

_MOLMO_REQUIRED = {
    "layer_norm_type": "rms",
    "clip_qkv": None,
    "weight_tying": False,
    "block_type": "sequential",
    "moe_num_experts": None,
}
"""Keys of which every published checkpoint but MolmoE's, where it has them, has one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The keys that arrays depend on, of each config that `models/text_model.py` reads by this."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    has_qkv_bias: bool
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    qk_norm: Literal["head", "own", "wide"] | None = None
    """How queries and keys are normed, before they are rotated: each head by one norm; each head by
    a norm of its own; all heads together; None: not at all."""
    norm_order: Literal["pre", "post", "both", "parallel"] = "pre"
    """Whether what attention and MLP read is normed, what they give, or both; parallel: they read
    the same, normed once."""
    norm_kind: Literal["rms", "gemma", "layer", "biased layer"] = "rms"
    """Whether the norms have a centred weight (`GemmaRMSNorm`); whether they take the mean away
    (`LayerNorm`), and have a bias."""
    has_gated_mlp: bool = True
    is_interleaved: bool = False
    """Whether neighbours in a head are a pair that is rotated, and not its halves."""
    windows: tuple[int | None, ...]
    """Per layer, how many tokens a token sees; None: all before it."""
    router: RouterConfig | None = None
    """How experts are chosen; None: there are none."""
    moe_intermediate_size: int = 0
    """Width inside of an expert."""
    num_shared_experts: int = 0
    """Experts that every token has, beside the routed ones."""
    clamped_gate: ClampedGate | None = None
    """How experts gate, where not by `hidden_act`."""
    has_expert_bias: bool = False
    dense_layers: tuple[int, ...] = ()
    """The layers without experts, where others have them."""
    rope_parameters: dict[str, Any]
    layer_ropes: tuple[dict[str, Any] | None, ...] | None = None
    """Per layer, the parameters of its angles, None where queries and keys have no positions; None:
    all have `rope_parameters`."""
    has_sinks: bool = False
    """Whether each head has the learned score of a key without a value, which all tokens see."""
    query_scales: tuple[int, tuple[float, ...]] | None = None
    """Queries are multiplied by one factor in each run of so many positions; None: they are not."""
    logit_scale: float = 1.0
    """What logits are multiplied by."""
    logit_cap: float | None = None
    score_scale: float | None = None
    """What scores are multiplied by; None: `head_dim ** -0.5`."""
    score_cap: float | None = None
    scales_embeds: bool = False
    """Whether embeddings of tokens are multiplied by the root of their width."""

    @staticmethod
    def from_hf(hf_config: Any) -> "LlamaConfig":
        """Read HF's config; `CheckpointError` for what a decoder of this kind cannot have."""
        read = _READERS.get(hf_config.model_type, _read_llama)
        num_heads = hf_config.num_attention_heads
        num_kv_heads = getattr(hf_config, "num_key_value_heads", None) or num_heads
        own_head_dim = getattr(hf_config, "head_dim", None)
        if not own_head_dim and (hf_config.hidden_size % num_heads or num_heads % num_kv_heads):
            raise CheckpointError(
                f"`num_attention_heads` is {num_heads}; it must divide `hidden_size`, and be a "
                f"multiple of `num_key_value_heads`: they are {hf_config.hidden_size} and "
                f"{num_kv_heads} beside {num_heads} heads"
            )
        shared = {
            "num_key_value_heads": num_kv_heads,
            "head_dim": own_head_dim or hf_config.hidden_size // num_heads,
            "windows": (None,) * hf_config.num_hidden_layers,
        }
        return read_config(LlamaConfig, hf_config, **{**shared, **read(hf_config)})


def _read_llama(hf_config: Any) -> dict[str, Any]:
    kind = hf_config.model_type
    has_qkv_bias = kind.startswith("qwen2") or getattr(hf_config, "attention_bias", False)
    # NOTE: HF assumes these sections where the config names none.
    of_axes = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text")
    has_axes = kind in of_axes
    sections = {"mrope_section": [16, 24, 24]} if has_axes else {}
    given = dict(hf_config.rope_parameters)
    if kind in ("qwen3_vl_text", "qwen3_vl_moe_text"):
        sections = {"mrope_section": [24, 20, 20]}
        given["mrope_interleaved"] = True  # HF's whatever the config says; all published say so
    return {
        "has_qkv_bias": has_qkv_bias,
        "has_output_bias": has_qkv_bias and not kind.startswith("qwen2"),
        "has_mlp_bias": getattr(hf_config, "mlp_bias", False),
        "qk_norm": "head" if kind.startswith("qwen3") else None,
        "windows": _read_windows(hf_config),
        "rope_parameters": sections | given,
    }


def _read_windows(hf_config: Any) -> tuple[int | None, ...]:
    """Return per layer how many tokens a token sees; None: all before it."""
    window, num_layers = getattr(hf_config, "sliding_window", None), hf_config.num_hidden_layers
    types = getattr(hf_config, "layer_types", None) or ["sliding_attention"] * num_layers
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise CheckpointError(
            f"`layer_types` holds {sorted(unknown)}; known: full_attention, sliding_attention"
        )
    return tuple(window if one == "sliding_attention" else None for one in types)


def _read_qwen3_moe(hf_config: Any) -> dict[str, Any]:
    step, without = hf_config.decoder_sparse_step, set(hf_config.mlp_only_layers or ())
    numbers = range(hf_config.num_hidden_layers)
    is_qwen3 = hf_config.model_type == "qwen3_moe"
    return {
        **_read_llama(hf_config),
        "router": RouterConfig(
            num_experts=hf_config.num_experts,
            top_k=hf_config.num_experts_per_tok,
            is_normalized=hf_config.norm_topk_prob if is_qwen3 else True,  # HF's, whatever it says
        ),
        "moe_intermediate_size": hf_config.moe_intermediate_size,
        "dense_layers": tuple(n for n in numbers if n in without or (n + 1) % step),
    }


def _read_gpt_oss(hf_config: Any) -> dict[str, Any]:
    return {
        **_read_llama(hf_config),
        "has_sinks": True,
        "router": RouterConfig(
            num_experts=hf_config.num_local_experts,
            top_k=hf_config.num_experts_per_tok,
            has_logit_bias=True,
            is_normalized=True,
        ),
        "moe_intermediate_size": hf_config.intermediate_size,
        "clamped_gate": ClampedGate(alpha=hf_config.swiglu_alpha, limit=hf_config.swiglu_limit),
        "has_expert_bias": True,
    }


def _read_phi3(hf_config: Any) -> dict[str, Any]:
    rope = dict(hf_config.rope_parameters)
    if rope.get("rope_type") == "longrope" and rope.get("factor") is None:
        # As HF: the keys of the decoder say it where those of the angles do not.
        trained = rope["original_max_position_embeddings"]
        rope["factor"] = hf_config.max_position_embeddings / trained
    return {**_read_llama(hf_config), "rope_parameters": rope}


def _read_qwen(hf_config: Any) -> dict[str, Any]:
    wanted = {"no_bias": True, "rotary_pct": 1.0}
    check_settings(hf_config, wanted, where="config.json", source="mmjax's decoder has")
    trained, longest = hf_config.seq_length, hf_config.max_position_embeddings
    # config.json may hold an integer.
    base, head_dim = float(hf_config.rotary_emb_base), hf_config.kv_channels
    rope: dict[str, Any] = {"rope_theta": base}
    if hf_config.use_dynamic_ntk:
        # By how often a prompt must be halved to be of the trained length.
        alphas = [2 ** (n + 1) - 1 for n in range(count_halvings(longest, trained) + 1)]
        rope["level_thetas"] = [base * alpha ** (head_dim / (head_dim - 2)) for alpha in alphas]
    scales = None
    if hf_config.use_logn_attn:
        places = np.maximum(np.arange(1, longest + 1), trained)
        scales = (1, tuple((np.log(places) / math.log(trained)).tolist()))
    return {
        "intermediate_size": hf_config.intermediate_size // 2,  # the file's counts both halves
        "hidden_act": "silu",
        "head_dim": head_dim,
        "rms_norm_eps": hf_config.layer_norm_epsilon,
        "has_qkv_bias": True,
        "rope_parameters": rope,
        "query_scales": scales,
    }


def _read_chameleon(hf_config: Any) -> dict[str, Any]:
    return {
        "has_qkv_bias": bool(hf_config.attention_bias),
        "has_output_bias": bool(hf_config.attention_bias),
        "has_mlp_bias": hf_config.mlp_bias,
        "qk_norm": "own",
        "norm_order": "post" if hf_config.swin_norm else "pre",
    }


def _read_molmo(hf_config: Any) -> dict[str, Any]:
    check_settings(hf_config, _MOLMO_REQUIRED, where="config.json", source="mmjax's Molmo takes")
    return {
        # Rows of the table that have logits; padding makes them even.
        "vocab_size": getattr(hf_config, "embedding_size", None) or hf_config.vocab_size,
        "intermediate_size": hf_config.intermediate_size // 2,  # the file's counts both halves
        "hidden_act": "silu",
        "rms_norm_eps": hf_config.layer_norm_eps,
        "has_qkv_bias": hf_config.qkv_bias,
        "qk_norm": "wide" if hf_config.attention_layer_norm else None,
        "norm_order": "post" if hf_config.norm_after else "pre",
        "rope_parameters": {"rope_theta": float(hf_config.rope_theta)},
    }


def _read_molmo2(hf_config: Any) -> dict[str, Any]:
    if hf_config.qk_norm_type not in ("qwen3", "olmo"):
        raise CheckpointError(
            f"`qk_norm_type` is {hf_config.qk_norm_type!r}; it must be `qwen3` (each head by one "
            "norm) or `olmo` (all heads together)"
        )
    values, scaled = _read_llama(hf_config), hf_config.rope_scaling_layers
    # The others' angles are of `rope_theta` alone.
    whole = values["rope_parameters"]
    plain = {"rope_theta": whole["rope_theta"]}
    every = range(hf_config.num_hidden_layers)
    return {
        **values,
        "has_output_bias": False,
        "qk_norm": "head" if hf_config.qk_norm_type == "qwen3" else "wide",
        "norm_order": "post" if hf_config.norm_after else "pre",
        "layer_ropes": None
        if scaled is None
        else tuple(whole if n in scaled else plain for n in every),
    }


def _read_glm(hf_config: Any) -> dict[str, Any]:
    return {
        **_read_llama(hf_config),
        "has_qkv_bias": hf_config.model_type == "glm4v_text",
        "has_output_bias": False,
        "norm_order": "both",
        "is_interleaved": True,
        # NOTE: HF assumes these sections where the config names none.
        "rope_parameters": {"mrope_section": [8, 12, 12], **hf_config.rope_parameters},
    }


def _read_glm_moe(hf_config: Any) -> dict[str, Any]:
    return {
        **_read_llama(hf_config),
        "has_output_bias": False,
        # NOTE: HF assumes these sections where the config names none.
        "rope_parameters": {"mrope_section": [8, 12, 12], **hf_config.rope_parameters},
        "router": RouterConfig(
            num_experts=hf_config.n_routed_experts,
            top_k=hf_config.num_experts_per_tok,
            has_sigmoid=True,
            has_correction_bias=True,
            num_groups=hf_config.n_group,
            num_chosen_groups=hf_config.topk_group,
            is_normalized=hf_config.norm_topk_prob,
            scale=hf_config.routed_scaling_factor,
        ),
        "moe_intermediate_size": hf_config.moe_intermediate_size,
        "num_shared_experts": hf_config.n_shared_experts,
        "dense_layers": tuple(range(hf_config.first_k_dense_replace)),
    }


def _read_paddleocr_vl(hf_config: Any) -> dict[str, Any]:
    biases = ("has_qkv_bias", "has_output_bias", "has_mlp_bias")
    return {**_read_llama(hf_config), **dict.fromkeys(biases, bool(hf_config.use_bias))}


def _read_ministral3(hf_config: Any) -> dict[str, Any]:
    rope = hf_config.rope_parameters
    given = ("llama_4_scaling_beta", "original_max_position_embeddings")
    missing = [name for name in given if rope.get(name) is None]
    if missing:
        raise CheckpointError(f"`rope_parameters` of a Ministral 3 lacks {', '.join(missing)}")
    beta, length = (rope[name] for name in given)
    # 1 + beta * log(1 + floor(position / length)), of which there are few values.
    factors = 1 + beta * np.log1p(np.arange(hf_config.max_position_embeddings // length + 1))
    return {**_read_llama(hf_config), "query_scales": (length, tuple(factors.tolist()))}


def _read_cohere(hf_config: Any) -> dict[str, Any]:
    if getattr(hf_config, "use_qk_norm", False):
        raise CheckpointError(
            "`use_qk_norm` is true; mmjax reads a `cohere` decoder without such norms alone"
        )
    return {
        "rms_norm_eps": hf_config.layer_norm_eps,
        "norm_kind": "layer",
        "has_qkv_bias": hf_config.attention_bias,
        "has_output_bias": hf_config.attention_bias,
        "norm_order": "parallel",
        "is_interleaved": True,
        "logit_scale": hf_config.logit_scale,
    }


def _read_cohere2(hf_config: Any) -> dict[str, Any]:
    windows = _read_windows(hf_config)
    values = _read_cohere(hf_config)
    ropes = tuple(None if window is None else hf_config.rope_parameters for window in windows)
    return {**values, "windows": windows, "layer_ropes": ropes}


def _read_persimmon(hf_config: Any) -> dict[str, Any]:
    return {
        "rms_norm_eps": hf_config.layer_norm_eps,
        "norm_kind": "biased layer",
        "qk_norm": "head" if hf_config.qk_layernorm else None,
        **dict.fromkeys(("has_qkv_bias", "has_output_bias", "has_mlp_bias"), True),
        "has_gated_mlp": False,
    }


def _read_gemma(hf_config: Any) -> dict[str, Any]:
    kind = hf_config.model_type
    # PaliGemma's decoders have the key, whose prompts see themselves (`sees` of the model).
    if hf_config.use_bidirectional_attention and kind == "gemma3_text":
        raise CheckpointError(
            "`use_bidirectional_attention` is true: an encoder, not a generator; "
            "mmjax serves checkpoints with causal text"
        )
    shared = {
        "norm_kind": "gemma",
        **dict.fromkeys(("has_qkv_bias", "has_output_bias"), hf_config.attention_bias),
        "scales_embeds": True,
    }
    if kind == "gemma":
        return shared
    windows, ropes = _read_windows(hf_config), hf_config.rope_parameters
    score_cap, logit_cap = (
        getattr(hf_config, f"{name}_logit_softcapping", None) for name in ("attn", "final")
    )
    is_third = kind == "gemma3_text"
    return {
        **shared,
        "hidden_act": hf_config.hidden_activation,
        "norm_order": "both",
        "qk_norm": "head" if is_third else None,
        "windows": windows,
        "layer_ropes": tuple(ropes[one] for one in hf_config.layer_types) if is_third else None,
        # config.json may hold integers.
        "score_scale": float(hf_config.query_pre_attn_scalar) ** -0.5,
        "score_cap": None if score_cap is None else float(score_cap),
        "logit_cap": None if logit_cap is None else float(logit_cap),
    }


_READERS: Mapping[str, Callable[[Any], dict[str, Any]]] = MappingProxyType(
    {
        "chameleon": _read_chameleon,
        "cohere": _read_cohere,
        "cohere2": _read_cohere2,
        **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _read_gemma),
        "glm4v_moe_text": _read_glm_moe,
        "glm4v_text": _read_glm,
        "glm_ocr_text": _read_glm,
        "gpt_oss": _read_gpt_oss,
        "ministral3": _read_ministral3,
        "molmo": _read_molmo,
        "molmo2_text": _read_molmo2,
        "paddleocr_vl_text": _read_paddleocr_vl,
        "persimmon": _read_persimmon,
        "phi3": _read_phi3,
        "qwen": _read_qwen,
        "qwen3_moe": _read_qwen3_moe,
        "qwen3_vl_moe_text": _read_qwen3_moe,
    }
)
"""By `model_type`, where it is not as Llama's."""


class LlamaTextModel(Decoder):
    """Llama's text model, and its relatives'."""

    def __init__(self, config: LlamaConfig, *, is_tied: bool, dtype: Any) -> None:
        self.config, num_layers = config, config.num_hidden_layers
        super().__init__(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=[_build_layer(config, n, dtype=dtype) for n in range(num_layers)],
            norm=_build_norm(config, config.hidden_size, dtype=dtype),
            is_tied=is_tied,
            kv_cache_spec=KVCacheSpec.alike(
                num_layers, num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim
            ),
            dtype=dtype,
        )

    def embed_input_ids(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up tokens; scaled, as in HF, by sqrt(D) rounded to the table's dtype."""
        embeds = super().embed_input_ids(token_ids)
        if not self.config.scales_embeds:
            return embeds
        return embeds * jnp.asarray(self.config.hidden_size**0.5, embeds.dtype)

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the vocabulary, in float32, scale and cap."""
        logits, scale = super().compute_logits(hidden_states), self.config.logit_scale
        return apply_soft_cap(logits if scale == 1.0 else logits * scale, self.config.logit_cap)

    def layer_inputs(self, positions: Int[Array, "3 T"]) -> Sequence[Any]:
        """Return the rotary angles, and what queries are multiplied by where they are."""
        config = self.config
        ropes = config.layer_ropes or (config.rope_parameters,) * config.num_hidden_layers
        kinds = {id(one): one for one in ropes if one is not None}
        made = {n: text_angles(one, config.head_dim, positions) for n, one in kinds.items()}
        angles = [None if one is None else made[id(one)] for one in ropes]
        if config.query_scales is None:
            return angles
        length, factors = config.query_scales
        scales = jnp.asarray(factors, jnp.float32)[positions[0] // length]
        return [(each, scales) for each in angles]


class MtpTextModel(LlamaTextModel):
    """One more layer, over a token's embedding and the state of the token before it, which guesses.

    Multi-token prediction (MTP): DeepSeek-V3's (arXiv 2412.19437, section 2.2), as GLM-OCR has it
    and vLLM's `glm_ocr_mtp.py` computes it, but that the state behind a guess is normed before it
    is read again (vLLM's pull request 46075, of GLM-5). The table of tokens and the head are the
    decoder's own. A token stands in the slot of the one before it, whose state is read there; the
    first of a prompt is in no step. Parameters bear HF's names, the layer its number in files.
    """

    def __init__(self, config: LlamaConfig, *, is_tied: bool, dtype: Any) -> None:
        number = config.num_hidden_layers
        one = replace(config, num_hidden_layers=1, windows=(None,), layer_ropes=None)
        super().__init__(one, is_tied=is_tied, dtype=dtype)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.layers = nnx.List([*(nnx.Module() for _ in range(number)), self.layers[0]])
        self.enorm = RMSNorm(width, eps=eps, dtype=dtype)
        self.hnorm = RMSNorm(width, eps=eps, dtype=dtype)
        self.eh_proj = Linear(2 * width, width, use_bias=False, dtype=dtype)
        self.kv_cache_spec = replace(self.kv_cache_spec, kept_width=width)

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Return the states that guess, and the cache; `positions` are of the tokens before."""
        (cache,), kept, states = read_kept_states(kv_cache, metadata)
        # As in vLLM: what stands behind the first token is not read.
        embeds = jnp.where((metadata.token_index == 0)[:, None], 0, inputs_embeds)
        with jax.named_scope("join"):
            joined = jnp.concatenate([self.enorm(embeds), self.hnorm(states)], axis=-1)
            x = self.eh_proj(joined)
        (angles,) = self.layer_inputs(positions)
        assert self.norm is not None, "the layer has no norm"
        x, cache = call_block(self.layers[-1], x, angles, cache, metadata)
        return self.norm(x), (cache, kept)


class Eagle3Config(NamedTuple):
    """What a head's config.json says beside its layer's keys."""

    target_width: int
    """Of the states that it reads."""
    num_tapped: int
    """Layers of the decoder whose inputs it reads."""
    draft_vocab_size: int
    """Tokens that it can guess."""
    norm_before_residual: bool
    norm_before_fc: bool


class Eagle3TextModel(LlamaTextModel):
    """One layer that guesses, of a token's embedding and several states of the token before.

    EAGLE-3 (arXiv 2503.01840, section 3.1), as vLLM's `llama_eagle3.py` computes it. `fc` joins the
    states as they are kept (`join_states`); behind a guess what the layer gives is read in their
    place, before its norm. The table of tokens is the decoder's, unscaled; where a picture's
    embedding stands the layer reads its placeholder's, as the published heads were trained. The
    head has the logits of some tokens, and `d2t` says how far behind its number each one's id is.
    """

    reads_token_ids = True

    def __init__(self, config: LlamaConfig, own: Eagle3Config, *, dtype: Any) -> None:
        super().__init__(config, is_tied=False, dtype=dtype)
        width = config.hidden_size
        attention = self._layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, name).weight.shape[0]
            options = {"use_bias": config.has_qkv_bias, "dtype": dtype}
            setattr(attention, name, Linear(2 * width, rows, **options))
        self.hidden_norm = _build_norm(config, width, dtype=dtype)
        joined = own.num_tapped * own.target_width
        self.input_norm = _build_norm(config, joined, dtype=dtype) if own.norm_before_fc else None
        self.fc = Linear(joined, width, use_bias=False, dtype=dtype)
        self.lm_head = Embed(own.draft_vocab_size, width, dtype=dtype)
        self.has_map = own.draft_vocab_size != config.vocab_size
        if self.has_map:
            self.d2t = nnx.Param(jnp.zeros((own.draft_vocab_size,), jnp.int32))
        self.norm_before_residual = own.norm_before_residual
        self.kv_cache_spec = replace(self.kv_cache_spec, kept_width=width)

    @property
    def _layer(self) -> Any:
        return self.layers[0]

    def join_states(self, states: Float[Array, "T _wide"]) -> Float[Array, "T D"]:
        """Return what is read of the decoder's states, which `Decoder.tap` has set."""
        tapped = states[:, -self.fc.weight.shape[1] :]
        return self.fc(tapped if self.input_norm is None else self.input_norm(tapped))

    def __call__(
        self,
        inputs_embeds: Float[Array, "T D"],
        positions: Int[Array, "3 T"],
        kv_cache: KVCache | None,
        metadata: AttentionMetadata,
        token_ids: Int[Array, " T"] | None = None,
    ) -> tuple[Float[Array, "T D"], KVCache | None]:
        """Return the layer's states without their norm; `positions` are of the tokens before."""
        assert token_ids is not None, "it looks up the tokens itself"
        (cache,), kept, states = read_kept_states(kv_cache, metadata)
        layer, (angles,) = self._layer, self.layer_inputs(positions)
        normed = self.hidden_norm(states)
        x = normed if self.norm_before_residual else states
        with jax.named_scope("attn"):
            embeds = layer.input_layernorm(self.embed_tokens(token_ids))
            joined = jnp.concatenate([embeds, normed], axis=-1)
            out, cache = layer.self_attn(joined, angles, cache, metadata)
            x = x + out
        with jax.named_scope("mlp"):
            return x + layer.mlp(layer.post_attention_layernorm(x)), (cache, kept)

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the tokens that it can guess; others have none."""
        assert self.norm is not None, "the layer has no norm"
        logits = super().compute_logits(self.norm(hidden_states))
        if not self.has_map:
            return logits
        ids = jnp.arange(logits.shape[1]) + self.d2t[...]
        others = jnp.full((len(logits), self.config.vocab_size), -jnp.inf, logits.dtype)
        return others.at[:, ids].set(logits)


def _build_norm(config: LlamaConfig, width: int, *, dtype: Any) -> nnx.Module:
    eps = config.rms_norm_eps
    if config.norm_kind in ("rms", "gemma"):
        return (RMSNorm if config.norm_kind == "rms" else GemmaRMSNorm)(width, eps=eps, dtype=dtype)
    return LayerNorm(width, eps=eps, has_bias=config.norm_kind == "biased layer", dtype=dtype)


def _build_qk_norm(config: LlamaConfig, num_heads: int, *, dtype: Any) -> nnx.Module | None:
    if config.qk_norm is None:
        return None
    if config.qk_norm == "own":
        return HeadNorm(num_heads, config.head_dim, dtype=dtype)
    width = config.head_dim * (num_heads if config.qk_norm == "wide" else 1)
    return _build_norm(config, width, dtype=dtype)


_LAYERS: Mapping[str, Callable[..., nnx.Module]] = MappingProxyType(
    {
        "pre": PreNormLayer,
        "post": PostNormLayer,
        "both": SandwichNormLayer,
        "parallel": ParallelLayer,
    }
)
"""By `norm_order`."""


def _build_mlp(config: LlamaConfig, number: int, *, dtype: Any) -> nnx.Module:
    if config.router is not None and number not in config.dense_layers:
        return MixtureOfExperts(
            config.hidden_size,
            config.moe_intermediate_size,
            config.router,
            num_shared=config.num_shared_experts,
            activation=config.hidden_act,
            clamped_gate=config.clamped_gate,
            use_bias=config.has_expert_bias,
            dtype=dtype,
        )
    return (GatedMLP if config.has_gated_mlp else MLP)(
        config.hidden_size,
        config.intermediate_size,
        activation=config.hidden_act,
        use_bias=config.has_mlp_bias,
        dtype=dtype,
    )


def _build_layer(config: LlamaConfig, number: int, *, dtype: Any) -> nnx.Module:
    scales = config.query_scales is not None
    attention = (ScaledQueryAttention if scales else GroupedQueryAttention)(
        config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        has_qkv_bias=config.has_qkv_bias,
        has_output_bias=config.has_output_bias,
        norms=(
            _build_qk_norm(config, config.num_attention_heads, dtype=dtype),
            _build_qk_norm(config, config.num_key_value_heads, dtype=dtype),
        ),
        norms_are_wide=config.qk_norm == "wide",
        is_interleaved=config.is_interleaved,
        scale=config.score_scale,
        window=config.windows[number],
        soft_cap=config.score_cap,
        has_sinks=config.has_sinks,
        dtype=dtype,
    )
    mlp = _build_mlp(config, number, dtype=dtype)
    make_norm = partial(_build_norm, config, config.hidden_size, dtype=dtype)
    return _LAYERS[config.norm_order](attention, mlp, make_norm)
