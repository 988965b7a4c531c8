"""Which decoder a checkpoint's `text_config` asks for: one table for every model around it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.language.bart import BartConfig, BartDecoder
from mmjax.language.deepseek import DeepseekConfig, DeepseekTextModel
from mmjax.language.gemma import GemmaConfig, GemmaTextModel
from mmjax.language.gemma4 import Gemma4Config, Gemma4TextModel
from mmjax.language.llama import LlamaConfig, LlamaTextModel
from mmjax.language.opt import OPTConfig, OPTTextModel
from mmjax.language.persimmon import PersimmonConfig, PersimmonTextModel
from mmjax.language.qwen import QwenConfig, QwenTextModel
from mmjax.layers.decoder import Decoder

_DECODERS: Mapping[str, tuple[Callable[[Any], Any], Callable[..., Decoder]]] = MappingProxyType(
    {
        "chameleon": (LlamaConfig.from_hf, LlamaTextModel),
        "bart": (BartConfig.from_hf, BartDecoder),
        "deepseek_v2": (DeepseekConfig.from_hf, DeepseekTextModel),
        "gemma": (GemmaConfig.from_hf, GemmaTextModel),
        "gemma2": (GemmaConfig.from_hf, GemmaTextModel),
        "gemma3_text": (GemmaConfig.from_hf, GemmaTextModel),
        "gemma4_text": (Gemma4Config.from_hf, Gemma4TextModel),
        "gemma4_unified_text": (Gemma4Config.from_hf, Gemma4TextModel),
        "glm4v_moe_text": (LlamaConfig.from_hf, LlamaTextModel),
        "glm4v_text": (LlamaConfig.from_hf, LlamaTextModel),
        "glm_ocr_text": (LlamaConfig.from_hf, LlamaTextModel),
        "llama": (LlamaConfig.from_hf, LlamaTextModel),
        "ministral3": (LlamaConfig.from_hf, LlamaTextModel),
        "mistral": (LlamaConfig.from_hf, LlamaTextModel),
        "molmo": (LlamaConfig.from_hf, LlamaTextModel),
        "molmo2_text": (LlamaConfig.from_hf, LlamaTextModel),
        "paddleocr_vl_text": (LlamaConfig.from_hf, LlamaTextModel),
        "persimmon": (PersimmonConfig.from_hf, PersimmonTextModel),
        "opt": (OPTConfig.from_hf, OPTTextModel),
        "qwen": (QwenConfig.from_hf, QwenTextModel),
        "qwen2": (LlamaConfig.from_hf, LlamaTextModel),
        "qwen2_5_vl_text": (LlamaConfig.from_hf, LlamaTextModel),
        "qwen2_vl_text": (LlamaConfig.from_hf, LlamaTextModel),
        "qwen3": (LlamaConfig.from_hf, LlamaTextModel),
        "qwen3_vl_moe_text": (LlamaConfig.from_hf, LlamaTextModel),
        "qwen3_vl_text": (LlamaConfig.from_hf, LlamaTextModel),
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
    read_config, build = _DECODERS[text_config.model_type]
    is_tied = hf_config.tie_word_embeddings if is_tied is None else is_tied
    return build(read_config(text_config), is_tied=is_tied, dtype=dtype)


def _key_of(hf_config: Any, text_config: Any) -> str:
    """Return the key of config.json that a wrapper's text configuration stands under."""
    # InternVL's original layout says `llm_config`, which HF's name only repeats.
    return "llm_config" if getattr(hf_config, "llm_config", None) is text_config else "text_config"
