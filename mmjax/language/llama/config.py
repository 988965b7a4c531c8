"""What Llama's decoder (arXiv 2302.13971) reads of config.json, and its relatives by a key of it.

Mistral (a window, arXiv 2310.06825), the first Qwen (the base of its angles grows with the prompt,
and queries behind the trained length do; arXiv 2309.16609, section 2.3), Qwen2 (biases on queries,
keys and values; arXiv 2407.10671), Qwen2-VL's text model (three axes of positions; arXiv
2409.12191), Qwen3 (norms on queries and keys; arXiv 2505.09388), Qwen3-VL's (both; its larger ones
have experts, as Qwen3-Omni's; arXiv 2511.21631, 2509.17765), Chameleon (other such norms, and in
the 34B norms behind each half of a block, as Swin v2's; arXiv 2405.09818), Molmo's Qwen2 and OLMo
(the same, at full width; arXiv 2409.17146), Molmo 2's Qwen3 and OLMo 3 (rotary angles of two kinds;
arXiv 2601.10611), Ministral 3 (queries that grow with their positions, as Llama 4's),
PaddleOCR-VL's Ernie 4.5 (as Qwen2-VL's, without biases; arXiv 2510.14528), GLM-4 (norms on both
sides of attention and MLP, neighbours rotated as pairs, a part of each head; its larger ones have
experts, and neither of both; arXiv 2507.01006), HunYuan (norms on queries and keys behind their
rotation, whose base is raised for longer prompts; HunyuanOCR's has four axes of positions, arXiv
2511.19575), Phi-3 (angles that longer prompts than the trained ones have of their own; arXiv
2404.14219), InternLM3 (Llama's by another name), gpt-oss (sinks, and experts with biases and a gate
of their own; arXiv 2508.10925), Command R and R7B (attention and MLP side by side behind one layer
norm, neighbours rotated as pairs, logits scaled; of R7B a layer that sees all tokens has no
positions, as in arXiv 2501.18795), Llama 4 (the same, in whose other layers a token sees those of
its chunk; experts in all layers or every second, weighed before they compute; Meta, 2025), EXAONE 4
(norms behind, on queries and keys as well; a layer that sees all tokens has no positions where
others have windows; arXiv 2507.11407), Persimmon, which is Fuyu's (Adept, 2023: layer norms, a part
of each head turns, an MLP without a gate, of squared ReLU: Primer, arXiv 2109.08668), Gemma 1
(norms with a centred weight, scaled embeddings; arXiv 2403.08295), 2 (norms on both sides, capped
scores and logits; 2408.00118) and 3 (norms on queries and keys, angles of two kinds; 2503.19786).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError, check_settings
from mmjax.layers.attention.metadata import ChunkWindow, Window
from mmjax.layers.moe import ClampedGate, RouterConfig
from mmjax.layers.rope import find_query_scales
from mmjax.rounding import count_halvings

_MOLMO_REQUIRED = {
    "layer_norm_type": "rms",
    "clip_qkv": None,
    "weight_tying": False,
    "block_type": "sequential",
    "moe_num_experts": None,
}
"""Keys of which every published checkpoint but MolmoE's, where it has them, has one value."""
_WINDOWED = frozenset(
    {
        *("cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "ministral3", "mistral"),
        *("phi3", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"),
        *("qwen3", "qwen3_moe"),
    }
)
"""The `model_type`s whose classes in HF obey `sliding_window`; others may have the key, too."""


class QueryScales(NamedTuple):
    """What queries are multiplied by: one factor in each run of so many positions."""

    length: int
    """Of a run."""
    factors: tuple[float, ...]
    shift: int = 0
    """How many positions before the second run's the first ends early."""
    is_everywhere: bool = True
    """Whether in all layers; else in those without positions."""


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
    qk_norm: Literal["head", "own", "wide", "unit"] | None = None
    """How queries and keys are normed, before they are rotated: each head by one norm; each head by
    a norm of its own; all heads together; each head without a weight, in the layers with positions;
    None: not at all."""
    norms_rotated_heads: bool = False
    """Whether they are normed behind that, and not before."""
    norm_order: Literal["pre", "post", "both", "parallel", "exaone4", "glm"] = "pre"
    """Whether what attention and MLP read is normed, what they give, or both; parallel: they read
    the same, normed once; exaone4: as post, glm: as both, with norms of other names."""
    norm_kind: Literal["rms", "gemma", "layer", "biased layer"] = "rms"
    """Whether the norms have a centred weight (`GemmaRMSNorm`); whether they take the mean away
    (`LayerNorm`), and have a bias."""
    has_gated_mlp: bool = True
    is_interleaved: bool = False
    """Whether neighbours in a head are a pair that is rotated, and not its halves."""
    windows: tuple[Window, ...]
    """Per layer, which tokens a token sees."""
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
    query_scales: QueryScales | None = None
    """What queries are multiplied by; None: they are not."""
    logit_scale: float = 1.0
    """What logits are multiplied by."""
    logit_cap: float | None = None
    score_scale: float | None = None
    """What scores are multiplied by; None: `head_dim ** -0.5`."""
    score_cap: float | None = None
    scales_embeds: bool = False
    """Whether embeddings of tokens are multiplied by the root of their width."""
    input_scale: float = 1.0
    """What embeddings are multiplied by, those of items too."""
    residual_scale: float = 1.0
    """What attention and MLP give is multiplied by, before it is added to the stream."""

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
    trained = given.get("original_max_position_embeddings")
    if given.get("rope_type") in ("yarn", "longrope") and trained and given.get("factor") is None:
        # As HF: the keys of the decoder say it where those of the angles do not.
        given["factor"] = hf_config.max_position_embeddings / trained
    if kind in ("qwen3_omni_moe_text", "qwen3_vl_text", "qwen3_vl_moe_text"):
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


def _read_windows(hf_config: Any) -> tuple[Window, ...]:
    """Return per layer which tokens a token sees."""
    num_layers = hf_config.num_hidden_layers
    has_windows = hf_config.model_type in _WINDOWED
    window = getattr(hf_config, "sliding_window", None) if has_windows else None
    types = getattr(hf_config, "layer_types", None) or ["sliding_attention"] * num_layers
    known: dict[str, Window] = {"full_attention": None, "sliding_attention": window}
    if size := getattr(hf_config, "attention_chunk_size", None):
        known["chunked_attention"] = ChunkWindow(size)
    if unknown := set(types) - known.keys():
        raise CheckpointError(
            f"`layer_types` holds {sorted(unknown)}; known: {', '.join(sorted(known))}"
        )
    return tuple(known[one] for one in types)


def _read_qwen3_moe(hf_config: Any) -> dict[str, Any]:
    step, without = hf_config.decoder_sparse_step, set(hf_config.mlp_only_layers or ())
    numbers = range(hf_config.num_hidden_layers)
    obeys = hf_config.model_type != "qwen3_vl_moe_text"
    return {
        **_read_llama(hf_config),
        "router": RouterConfig(
            num_experts=hf_config.num_experts,
            top_k=hf_config.num_experts_per_tok,
            is_normalized=hf_config.norm_topk_prob if obeys else True,  # HF's, whatever it says
        ),
        "moe_intermediate_size": hf_config.moe_intermediate_size,
        "dense_layers": tuple(n for n in numbers if n in without or (n + 1) % step),
    }


def _read_qwen3_omni_moe(hf_config: Any) -> dict[str, Any]:
    # HF's class has the key, and obeys it nowhere.
    where = {"where": "config.json", "source": "mmjax's decoder has"}
    check_settings(hf_config, {"sliding_window": None}, **where)
    return _read_qwen3_moe(hf_config)


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
        scales = QueryScales(1, tuple((np.log(places) / math.log(trained)).tolist()))
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
        "norm_order": "glm",
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


def _read_hunyuan(hf_config: Any) -> dict[str, Any]:
    rope, sections = dict(hf_config.rope_parameters), None
    if hf_config.model_type == "hunyuan_vl_text":
        sections = rope.get("mrope_section")
        if len(sections or ()) != 4:
            raise CheckpointError(
                f"`mrope_section` (or `xdrope_section`) of the decoder is {sections}; mmjax's "
                "HunYuan-VL has four axes: position, column, row and image"
            )
    kind, theta = rope.get("rope_type", "default"), float(rope["rope_theta"])
    if kind == "dynamic" and rope.get("alpha"):
        head_dim = hf_config.head_dim
        theta *= rope["alpha"] ** (head_dim / (head_dim - 2))
    elif kind != "default":
        raise CheckpointError(
            f"`rope_type` is `{kind}`, `alpha` {rope.get('alpha')}; a HunYuan is served with "
            "`dynamic` (or `xdrope`) and an `alpha`, or with `default`"
        )
    return {
        **_read_llama(hf_config),
        "qk_norm": "head",
        "norms_rotated_heads": True,
        "rope_parameters": {"rope_theta": theta}
        | ({"mrope_section": sections} if sections else {}),
    }


def _read_ministral3(hf_config: Any) -> dict[str, Any]:
    longest = hf_config.max_position_embeddings
    scales = QueryScales(*find_query_scales(hf_config.rope_parameters, longest))
    return {**_read_llama(hf_config), "query_scales": scales}


def _read_llama4(hf_config: Any) -> dict[str, Any]:
    rope = dict(hf_config.rope_parameters)
    longest, length = hf_config.max_position_embeddings, hf_config.floor_scale
    # 1 + scale * log(1 + floor((position + 1) / length)): scalable softmax, arXiv 2501.19399.
    factors = 1 + hf_config.attn_scale * np.log1p(np.arange((longest + 1) // length + 1))
    scales = QueryScales(length, tuple(factors.tolist()), shift=1, is_everywhere=False)
    return {
        **_read_llama(hf_config),
        "intermediate_size": hf_config.intermediate_size_mlp,
        "qk_norm": "unit" if hf_config.use_qk_norm else None,
        "is_interleaved": True,
        "layer_ropes": tuple(rope if has_rope else None for has_rope in hf_config.no_rope_layers),
        "query_scales": scales if hf_config.attn_temperature_tuning else None,
        "router": RouterConfig(
            num_experts=hf_config.num_local_experts,
            top_k=hf_config.num_experts_per_tok,
            has_sigmoid=True,
            scales_inputs=True,
        ),
        "moe_intermediate_size": hf_config.intermediate_size,
        "num_shared_experts": 1,
        "dense_layers": tuple({*range(hf_config.num_hidden_layers)} - {*hf_config.moe_layers}),
    }


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


def _read_exaone4(hf_config: Any) -> dict[str, Any]:
    windows, rope = _read_windows(hf_config), hf_config.rope_parameters
    is_hybrid = getattr(hf_config, "sliding_window", None) is not None
    return {
        "has_qkv_bias": False,
        "qk_norm": "head",
        "norm_order": "exaone4",
        "windows": windows,
        "layer_ropes": tuple(None if window is None else rope for window in windows)
        if is_hybrid
        else None,
    }


def _read_granite(hf_config: Any) -> dict[str, Any]:
    # config.json may hold integers.
    return {
        **_read_llama(hf_config),
        "input_scale": float(hf_config.embedding_multiplier),
        "score_scale": float(hf_config.attention_multiplier),
        "residual_scale": float(hf_config.residual_multiplier),
        "logit_scale": 1 / hf_config.logits_scaling,
    }


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
        "exaone4": _read_exaone4,
        **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _read_gemma),
        "glm4v_moe_text": _read_glm_moe,
        "glm4v_text": _read_glm,
        "glm_ocr_text": _read_glm,
        "gpt_oss": _read_gpt_oss,
        "hunyuan_v1_dense": _read_hunyuan,
        "hunyuan_vl_text": _read_hunyuan,
        "llama4_text": _read_llama4,
        **dict.fromkeys(("granite", "granite4_vision_text", "granite_docling_text"), _read_granite),
        "ministral3": _read_ministral3,
        "molmo": _read_molmo,
        "molmo2_text": _read_molmo2,
        "paddleocr_vl_text": _read_paddleocr_vl,
        "persimmon": _read_persimmon,
        "qwen": _read_qwen,
        "qwen3_moe": _read_qwen3_moe,
        "qwen3_omni_moe_text": _read_qwen3_omni_moe,
        "qwen3_vl_moe_text": _read_qwen3_moe,
    }
)
"""By `model_type`, where it is not as Llama's."""
