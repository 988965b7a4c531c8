"""Which decoder a checkpoint's `text_config` asks for: one table for every model around it.

And what its files name or join otherwise than our tree, behind whatever prefix the model around it
has.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.language.deepseek import DeepseekConfig, DeepseekTextModel
from mmjax.language.encoder_decoder.bart import BartConfig, BartDecoder
from mmjax.language.encoder_decoder.t5 import T5Config, T5Decoder
from mmjax.language.ernie4_5_vl import Ernie45VLConfig, Ernie45VLTextModel
from mmjax.language.gemma4 import Gemma4Config, Gemma4TextModel
from mmjax.language.lfm2 import Lfm2Config, Lfm2TextModel
from mmjax.language.llama.config import LlamaConfig
from mmjax.language.llama.decoder import LlamaTextModel
from mmjax.language.llama.mllama import MllamaConfig, MllamaTextModel
from mmjax.language.qwen3_5 import Qwen35Config, Qwen35TextModel
from mmjax.layers.decoder import Decoder
from mmjax.weights.rules import (
    Rule,
    RuleTypes,
    Split,
    Squeeze,
    Stack,
    Transposition,
    Unstack,
)

_LLAMAS = (
    *("chameleon", "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text"),
    *("glm4v_moe_text", "glm4v_text", "glm_ocr_text", "gpt_oss", "granite"),
    *("granite4_vision_text", "granite_docling_text", "hunyuan_v1_dense", "hunyuan_vl_text"),
    *("internlm3", "llama", "llama4_text", "ministral3", "mistral", "molmo", "molmo2_text"),
    *("paddleocr_vl_text", "persimmon", "phi3", "qwen", "qwen2"),
    *("qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_moe"),
    *("qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text"),
)
"""The `model_type`s that `LlamaConfig` reads."""
_DECODERS: Mapping[str, tuple[Callable[[Any], Any], Callable[..., Decoder]]] = MappingProxyType(
    {
        **dict.fromkeys(_LLAMAS, (LlamaConfig.from_hf, LlamaTextModel)),
        **dict.fromkeys(("bart", "opt", "whisper"), (BartConfig.from_hf, BartDecoder)),
        **dict.fromkeys(
            ("deepseek_ocr2_text", "unlimited_ocr_text"),
            (partial(DeepseekConfig.from_hf, use_mla=False), DeepseekTextModel),
        ),
        **dict.fromkeys(
            ("deepseek_v2", "deepseek_v3", "mistral4"), (DeepseekConfig.from_hf, DeepseekTextModel)
        ),
        "ernie4_5_vl_moe_text": (Ernie45VLConfig.from_hf, Ernie45VLTextModel),
        **dict.fromkeys(
            ("gemma4_text", "gemma4_unified_text"), (Gemma4Config.from_hf, Gemma4TextModel)
        ),
        "lfm2": (Lfm2Config.from_hf, Lfm2TextModel),
        "lfm3": (Lfm2Config.from_lfm3, Lfm2TextModel),
        "mllama_text_model": (MllamaConfig.from_hf, MllamaTextModel),
        **dict.fromkeys(
            ("qwen3_5_moe_text", "qwen3_5_text"), (Qwen35Config.from_hf, Qwen35TextModel)
        ),
        "t5": (T5Config.from_hf, T5Decoder),
    }
)
"""By `model_type`: what reads its configuration, and the module that is built of that."""


def build_text_model(hf_config: Any, *, dtype: Any, is_tied: bool | None = None) -> Decoder:
    """Return the decoder of a wrapper's `text_config`; `CheckpointError` for one not known.

    `is_tied`: whether the head is the table of tokens; None: as the wrapper's key says.
    """
    text_config = hf_config.get_text_config()
    if text_config.model_type not in _DECODERS:
        raise CheckpointError(
            f"`{_key_of(hf_config, text_config)}.model_type` is `{text_config.model_type}`, a "
            "decoder that mmjax does not have; it has "
            f"{', '.join(f'`{name}`' for name in _DECODERS)}"
        )
    if not getattr(text_config, "is_causal", True):  # which HF's masks obey
        raise CheckpointError(
            f"`{_key_of(hf_config, text_config)}.is_causal` is false: an encoder, not a generator; "
            "mmjax serves checkpoints with causal text"
        )
    read_config, build = _DECODERS[text_config.model_type]
    is_tied = hf_config.tie_word_embeddings if is_tied is None else is_tied
    return build(read_config(text_config), is_tied=is_tied, dtype=dtype)


def is_head_tied(hf_config: Any) -> bool:
    """Return whether the head is the table of tokens, as the transformers that wrote it meant it.

    Before 5.0 the text model's own key said so, and the wrapper's was not written.
    """
    written_by = getattr(hf_config, "transformers_version", None) or ""
    if written_by.startswith("4."):
        return hf_config.get_text_config().tie_word_embeddings
    return hf_config.tie_word_embeddings


_PREFIX = r"^(?:thinker\.)?(?:model\.|mtp\.)?(?:language_model\.)?(?:model\.)?"
_LAYER = _PREFIX + r"(layers\.\d+\."
"""The beginning of a name in a layer, of any layout; the group is closed by what follows."""
_GATE, _UP, _DOWN = (rf"language_model.\1{name}_proj" for name in ("gate", "up", "down"))


def text_rules(hf_config: Any) -> tuple[RuleTypes, ...]:
    """Return how names of the decoder's layers become the tree's, before a model's own rules."""
    text_config = hf_config.get_text_config()
    make_rules = _RULES.get(text_config.model_type)
    return () if make_rules is None else make_rules(text_config)


def _list_bart(text_config: Any) -> tuple[RuleTypes, ...]:
    linear = r"(layers\.\d+\.)(fc[12])\."
    decoder = Rule(_PREFIX + r"(?:decoder\.)?" + linear, r"language_model.\1mlp.\2.")
    if text_config.model_type == "whisper":  # whose encoder is a tower
        return (decoder,)
    return (decoder, Rule(_PREFIX + r"encoder\." + linear, r"encoder.\1mlp.\2."))


def _list_persimmon(text_config: Any) -> tuple[RuleTypes, ...]:
    # In the file, the rows of a head's query, key and value stand together.
    head_dim = text_config.hidden_size // text_config.num_attention_heads
    return (
        Split.of_qkv(
            _LAYER + r"self_attn\.)query_key_value\.", r"language_model.\1", (head_dim,) * 3
        ),
        Rule(_LAYER + r"self_attn\.)dense\.", r"language_model.\1o_proj."),
        Rule(_LAYER + r"self_attn\.[qk]_)layernorm\.", r"language_model.\1norm."),
        Rule(_LAYER + r"mlp\.)dense_h_to_4h\.", r"language_model.\1fc1."),
        Rule(_LAYER + r"mlp\.)dense_4h_to_h\.", r"language_model.\1fc2."),
        Rule(_PREFIX + r"final_layernorm\.", "language_model.norm."),
    )


def _list_fused_mlp(text_config: Any) -> tuple[RuleTypes, ...]:
    halves = (text_config.intermediate_size,) * 2
    return (Split(_LAYER + r"mlp\.)gate_up_proj\.", [f"{_GATE}.", f"{_UP}."], halves),)


def _list_hunyuan(text_config: Any) -> tuple[RuleTypes, ...]:
    del text_config
    return (
        Rule(_LAYER + r"self_attn\.)query_layernorm\.", r"language_model.\1q_norm."),
        Rule(_LAYER + r"self_attn\.)key_layernorm\.", r"language_model.\1k_norm."),
    )


def _list_lfm2(text_config: Any) -> tuple[RuleTypes, ...]:
    """Read LFM2's names, and LFM3's, whose norms may be as many as Gemma's."""
    both = getattr(text_config, "use_sandwich_norm", False)
    names = {
        "operator_norm": "input_layernorm",
        "post_operator_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm" if both else "post_attention_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
        **{
            f"feed_forward.w{n}": f"mlp.{name}_proj"
            for n, name in ((1, "gate"), (2, "down"), (3, "up"))
        },
        "self_attn.out_proj": "self_attn.o_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "self_attn.gate_proj": "self_attn.g_proj",
    }
    last = r"^(?:model\.)?(?:language_model\.)?(?:model\.)?embedding_norm\."
    return (
        *(
            Rule(rf"{_LAYER}){re.escape(old)}\.", rf"language_model.\1{new}.")
            for old, new in names.items()
        ),
        Rule(last, "language_model.norm."),
    )


def _find_widths(text_config: Any) -> list[int]:
    """Return the rows of queries, keys and values."""
    heads = text_config.num_attention_heads
    key_heads = getattr(text_config, "num_key_value_heads", None) or heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    return [head_dim * number for number in (heads, key_heads, key_heads)]


def _list_phi3(text_config: Any) -> tuple[RuleTypes, ...]:
    fused, widths = _LAYER + r"self_attn\.)qkv_proj\.", _find_widths(text_config)
    qkv = Split.of_qkv(fused, r"language_model.\1", widths)
    return (qkv, *_list_fused_mlp(text_config))


def _list_molmo(text_config: Any) -> tuple[RuleTypes, ...]:
    """Read the published names; Molmo 2's have modules for attention and the MLP."""
    block, layer = r"^model\.transformer\.blocks\.(\d+)\.", r"language_model.layers.\1."
    # The size in Molmo's config counts both halves.
    inner = text_config.intermediate_size // (2 if text_config.model_type == "molmo" else 1)
    names = {
        block + r"(?:self_attn\.)?attn_out\.": layer + "self_attn.o_proj.",
        block + r"(?:self_attn\.)?([qk])_norm\.": layer + r"self_attn.\2_norm.",
        block + r"(?:mlp\.)?ff_out\.": layer + "mlp.down_proj.",
        block + r"attn_norm\.": layer + "input_layernorm.",
        block + r"ff_norm\.": layer + "post_attention_layernorm.",
        r"^model\.transformer\.wte\.embedding$": "language_model.embed_tokens.weight",
        r"^model\.transformer\.wte\.new_embedding$": "new_embed_tokens.weight",
        r"^model\.transformer\.ln_f\.": "language_model.norm.",
        r"^model\.transformer\.ff_out\.": "language_model.lm_head.",
    }
    return (
        Split.of_qkv(
            block + r"(?:self_attn\.)?att_proj\.", f"{layer}self_attn.", _find_widths(text_config)
        ),
        Split(
            block + r"(?:mlp\.)?ff_proj\.",
            [f"{layer}mlp.{part}_proj." for part in ("up", "gate")],
            [inner] * 2,
        ),
        *(Rule(pattern, name) for pattern, name in names.items()),
    )


def _list_experts(text_config: Any) -> tuple[RuleTypes, ...]:
    """Stack experts that lie apart, and cut those that are stacked already.

    Matrices of the latter are `[in, out]` in Qwen3-VL's files, and `[out, in]` in what HF's
    modules save.
    """
    experts = _LAYER + r"(?:mlp\.)?experts\.)"
    inner = getattr(text_config, "moe_intermediate_size", 0) or 0  # there may be none
    return (
        Stack(experts + r"(?P<index>\d+)\.(\w+_proj)\.weight$", r"language_model.\1\3"),
        Split(experts + "gate_up_proj$", [_GATE, _UP], (inner, inner), of_stack=True),
        Split(experts + "down_proj$", [_DOWN], (text_config.hidden_size,), of_stack=True),
    )


def _list_ernie(text_config: Any) -> tuple[RuleTypes, ...]:
    """Part the experts of text from those of pictures, which stand behind them in the files."""
    mlp, number = _LAYER + r"mlp\.)", text_config.moe_num_experts
    bias = "gate.e_score_correction_bias"
    rules: list[RuleTypes] = [
        Rule(mlp + r"gate\.weight$", r"language_model.\1text_moe.gate.weight", Transposition()),
        Rule(mlp + r"gate\.weight_1$", r"language_model.\1vision_moe.gate.weight", Transposition()),
        Rule(
            _LAYER + r"mlp\.\w+_moe\.)gate\.moe_statics\.e_score_correction_bias$",
            rf"language_model.\1{bias}",
            Squeeze(),
        ),
        Unstack(
            mlp + r"moe_statics\.e_score_correction_bias$",
            [rf"language_model.\1{kind}_moe.{bias}" for kind in ("text", "vision")],
            _keep,
            axis=0,
        ),
    ]
    for kind, width in zip(("text", "vision"), text_config.moe_intermediate_size, strict=True):
        first = number * (kind == "vision")
        indices = "|".join(str(index) for index in range(first, first + number))
        ours = rf"language_model.\1{kind}_moe.experts."
        stacked = _LAYER + rf"mlp\.){kind}_moe\.experts\."
        parts = [f"{ours}{part}_proj" for part in ("gate", "up")]
        rules += [
            Stack(
                mlp + rf"experts\.(?P<index>{indices})\.(\w+_proj)\.weight$", rf"{ours}\3", first
            ),
            Split(f"{stacked}gate_up_proj$", parts, (width, width), of_stack=True),
            Split(
                f"{stacked}down_proj$",
                [f"{ours}down_proj"],
                (text_config.hidden_size,),
                of_stack=True,
            ),
        ]
    return tuple(rules)


def _keep(tensor: Any) -> Any:
    return tensor


def _list_deepseek(text_config: Any) -> tuple[RuleTypes, ...]:
    """Part the keys' half of `kv_b_proj` from the values', and read experts of either layout."""
    halves = [rf"language_model.\1{part}_b_proj." for part in "kv"]
    sizes = (text_config.qk_nope_head_dim, text_config.v_head_dim)
    return (
        Split(_LAYER + r"self_attn\.)kv_b_proj\.", halves, sizes),
        *_list_experts(text_config),
    )


def _list_gpt_oss(text_config: Any) -> tuple[RuleTypes, ...]:
    """Turn the experts' matrices, which are `[in, out]`; those of gate and up alternate."""
    experts, width = _LAYER + r"mlp\.experts\.)", text_config.hidden_size
    halves = (text_config.intermediate_size,) * 2
    stack = {"of_stack": True, "is_transposed": True}
    both = {**stack, "is_interleaved": True}
    return (
        Split(experts + "gate_up_proj$", [_GATE, _UP], halves, **both),
        Split(experts + "gate_up_proj_bias$", [f"{_GATE}_bias", f"{_UP}_bias"], halves, **both),
        Split(experts + "down_proj$", [_DOWN], (width,), **stack),
        Rule(_LAYER + r"mlp\.)router\.", r"language_model.\1gate."),
    )


def _list_llama4(text_config: Any) -> tuple[RuleTypes, ...]:
    """Turn the experts' matrices, which are `[in, out]`; some files have them one by one."""
    feed, mlp = _LAYER + r")feed_forward\.", r"language_model.\1mlp."
    halves, stack = (text_config.intermediate_size,) * 2, {"of_stack": True, "is_transposed": True}
    gate, up, down = (f"{mlp}experts.{name}_proj" for name in ("gate", "up", "down"))
    return (
        Split(feed + r"experts\.gate_up_proj$", [gate, up], halves, **stack),
        Split(feed + r"experts\.down_proj$", [down], (text_config.hidden_size,), **stack),
        Stack(feed + r"experts\.(?P<index>\d+)\.(\w+_proj)\.weight$", mlp + r"experts.\3"),
        Rule(feed + r"router\.", mlp + "gate."),
        Rule(feed + r"shared_expert\.", mlp + "shared_experts."),
        Rule(feed, mlp),
    )


_RULES: Mapping[str, Callable[[Any], tuple[RuleTypes, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(("bart", "opt", "whisper"), _list_bart),
        "deepseek_ocr2_text": _list_experts,
        "deepseek_v3": _list_deepseek,
        "ernie4_5_vl_moe_text": _list_ernie,
        "gemma4_text": _list_experts,
        "gemma4_unified_text": _list_experts,
        "glm4v_moe_text": _list_experts,
        "glm4v_text": _list_fused_mlp,
        "glm_ocr_text": _list_fused_mlp,
        "gpt_oss": _list_gpt_oss,
        "hunyuan_v1_dense": _list_hunyuan,
        "hunyuan_vl_text": _list_hunyuan,
        **dict.fromkeys(("lfm2", "lfm3"), _list_lfm2),
        "llama4_text": _list_llama4,
        "mistral4": _list_deepseek,
        "molmo": _list_molmo,
        "molmo2_text": _list_molmo,
        "persimmon": _list_persimmon,
        "phi3": _list_phi3,
        "qwen3_5_moe_text": _list_experts,
        "qwen3_moe": _list_experts,
        "qwen3_omni_moe_text": _list_experts,
        "qwen3_vl_moe_text": _list_experts,
        "unlimited_ocr_text": _list_experts,
    }
)
"""By `model_type`, where files are not as the tree but for the prefix."""


def _key_of(hf_config: Any, text_config: Any) -> str:
    """Return the key of config.json that a wrapper's text configuration stands under."""
    # InternVL's original layout says `llm_config`, which HF's name only repeats.
    return "llm_config" if getattr(hf_config, "llm_config", None) is text_config else "text_config"
