"""HF's configuration of a checkpoint that has its authors' own, whose code knows the rest."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mmjax.errors import CheckpointError

DEEPSEEK_OCR2 = "DeepseekOCR2ForCausalLM"
"""The architecture of `deepseek-ai/DeepSeek-OCR-2`, whose `model_type` is DeepSeek-VL2's."""
_DEEPSEEK_OCR2_OF_HF = "DeepseekOcr2ForConditionalGeneration"
EAGLE3 = "LlamaForCausalLMEagle3"
"""The architecture of heads that guess tokens ahead."""
SPECULATORS_KIND = "speculators_model_type"
"""The key of config.json that heads in the format of vLLM's `speculators` have."""
QUERY_ENCODER: Mapping[str, Any] = MappingProxyType(
    {
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "vocab_size": 1,
    }
)
"""What the published code builds of Qwen2 0.5B; config.json has its width alone."""
SAM_DEFAULTS: Mapping[str, Any] = MappingProxyType({"patch_size": 16, "output_channels": 256})
"""What it builds of SAM beside the keys of config.json."""
_IMAGE_TOKEN_ID = 128815
_WITHOUT_LATENT = ("use_mla", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def build_deepseek_ocr2_config(raw: Mapping[str, Any]) -> Any:
    """Return HF's configuration of DeepSeek-OCR 2's own config.json; `is_original` is true in it.

    `CheckpointError` where its decoder has latent attention; KeyError for keys that are missing.
    """
    from transformers import AutoConfig

    vision, language = raw["vision_config"], dict(raw["language_config"])
    sam, width = vision["width"]["sam_vit_b"], vision["width"]["qwen2-0-5b"]["dim"]
    if language.get("use_mla", True):
        raise CheckpointError(
            "`language_config.use_mla` is not false; DeepSeek-OCR 2's decoder has plain attention"
        )
    num_dense, num_layers = language.get("first_k_dense_replace", 0), language["num_hidden_layers"]
    kinds = ["dense" if number < num_dense else "sparse" for number in range(num_layers)]
    text = {key: value for key, value in language.items() if key not in _WITHOUT_LATENT}
    sam_config = {
        **SAM_DEFAULTS,
        "image_size": vision["image_size"],
        "hidden_size": sam["width"],
        "num_hidden_layers": sam["layers"],
        "num_attention_heads": sam["heads"],
        "global_attn_indexes": sam["global_attn_indexes"],
        # The last ones are as many as the encoder is wide, whatever the key says.
        "downsample_channels": [*sam["downsample_channels"][:-1], width],
    }
    return AutoConfig.for_model(
        "deepseek_ocr2",
        architectures=[_DEEPSEEK_OCR2_OF_HF],
        is_original=True,
        text_config={**text, "mlp_layer_types": kinds, "model_type": "deepseek_ocr2_text"},
        vision_config={
            "sam_config": sam_config,
            "encoder_config": {**QUERY_ENCODER, "hidden_size": width},
        },
        image_token_id=_IMAGE_TOKEN_ID,
        tie_word_embeddings=language.get("tie_word_embeddings", False),
        dtype=raw.get("torch_dtype") or raw.get("dtype"),
    )


def build_speculator_config(raw: Mapping[str, Any]) -> Any:
    """Return a speculator's configuration: its layer's, and its own keys beside.

    `CheckpointError` for another kind than EAGLE-3; KeyError without a layer.
    """
    from transformers import AutoConfig

    kind = raw[SPECULATORS_KIND]
    if kind != "eagle3":
        raise CheckpointError(
            f"`{SPECULATORS_KIND}` of config.json is {kind!r}; mmjax reads speculators of the "
            "kind 'eagle3'"
        )
    own = {key: value for key, value in raw.items() if not isinstance(value, dict)}
    layer = {"norm_before_residual": True, **own, **raw["transformer_layer_config"]}
    # Its modules are named as the published ones' of EAGLE-3.
    return AutoConfig.for_model(**{**layer, "architectures": [EAGLE3]})
