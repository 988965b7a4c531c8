"""HF's configuration of a checkpoint that has its authors' own, whose code knows the rest."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mmjax.errors import CheckpointError

DEEPSEEK_OCR = "DeepseekOCRForCausalLM"
"""The architecture of `deepseek-ai/DeepSeek-OCR`, whose `model_type` is DeepSeek-VL2's."""
DEEPSEEK_OCR2 = "DeepseekOCR2ForCausalLM"
"""That of `deepseek-ai/DeepSeek-OCR-2`."""
UNLIMITED_OCR = "UnlimitedOCRForCausalLM"
"""That of `baidu/Unlimited-OCR`."""
_DEEPSEEK_OCR2_OF_HF = "DeepseekOcr2ForConditionalGeneration"
_UNLIMITED_OCR_OF_HF = "UnlimitedOcrForConditionalGeneration"
_PUBLISHED_WINDOW = 128
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


def build_deepseek_ocr_config(raw: Mapping[str, Any]) -> Any:
    """Return HF's configuration of a DeepSeek OCR model's own config.json; `is_original` is true.

    Of `DEEPSEEK_OCR2`, or of `DEEPSEEK_OCR` and `UNLIMITED_OCR`, which are one class in HF.
    `CheckpointError` where its decoder has latent attention, or what is between tower and decoder
    is another; KeyError for keys that are missing.
    """
    from transformers import AutoConfig

    (architecture,) = raw["architectures"]
    width = raw["vision_config"]["width"]
    if architecture == DEEPSEEK_OCR2:
        reader, served = width["qwen2-0-5b"]["dim"], _DEEPSEEK_OCR2_OF_HF
        encoder, kind = {**QUERY_ENCODER, "hidden_size": reader}, "deepseek_ocr2"
    else:
        clip = width["clip-l-14-224"]
        reader, kind = clip["width"], "unlimited_ocr"
        served = DEEPSEEK_OCR if architecture == DEEPSEEK_OCR else _UNLIMITED_OCR_OF_HF
        encoder = {
            "hidden_size": reader,
            "intermediate_size": 4 * reader,
            "num_hidden_layers": clip["layers"],
            "num_attention_heads": clip["heads"],
            "image_size": clip["image_size"],
            "patch_size": clip["patch_size"],
        }
    _check_layout(raw)
    return AutoConfig.for_model(
        kind,
        architectures=[served],
        is_original=True,
        text_config={**_read_language(raw), "model_type": f"{kind}_text"},
        vision_config={"sam_config": _read_sam(raw, reader), "encoder_config": encoder},
        image_token_id=_IMAGE_TOKEN_ID,
        tie_word_embeddings=raw["language_config"].get("tie_word_embeddings", False),
        dtype=raw.get("torch_dtype") or raw.get("dtype"),
    )


def _check_layout(raw: Mapping[str, Any]) -> None:
    projector = raw.get("projector_config", {}).get("projector_type", "linear")
    for name, found, served in (
        ("projector_config.projector_type", projector, "linear"),
        ("tile_tag", raw.get("tile_tag", "2D"), "2D"),
    ):
        if found != served:
            raise CheckpointError(
                f"`{name}` of config.json is {found!r}; mmjax serves {served!r} alone"
            )


def _read_language(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the decoder, of whose layers config.json says other things than HF."""
    language = raw["language_config"]
    if language.get("use_mla", True):
        raise CheckpointError(
            "`language_config.use_mla` is not false; the decoders of DeepSeek's OCR models have "
            "plain attention"
        )
    num_dense, num_layers = language.get("first_k_dense_replace", 0), language["num_hidden_layers"]
    kinds = ["dense" if number < num_dense else "sparse" for number in range(num_layers)]
    text = {key: value for key, value in language.items() if key not in _WITHOUT_LATENT}
    text["mlp_layer_types"] = kinds
    if raw["architectures"] == [UNLIMITED_OCR]:
        # Both names stand beside the others in the file.
        named = [raw[key] for key in ("sliding_window", "sliding_window_size") if raw.get(key)]
        text["sliding_window"] = named[0] if named else _PUBLISHED_WINDOW
        text["layer_types"] = ["reference_sliding_attention"] * num_layers
    elif raw["architectures"] == [DEEPSEEK_OCR]:
        text["layer_types"] = ["full_attention"] * num_layers
    return text


def _read_sam(raw: Mapping[str, Any], reader_width: int) -> dict[str, Any]:
    """Return the keys of SAM, whose last channels are as many as what reads them is wide."""
    sam = raw["vision_config"]["width"]["sam_vit_b"]
    return {
        **SAM_DEFAULTS,
        "image_size": raw["vision_config"]["image_size"],
        "hidden_size": sam["width"],
        "num_hidden_layers": sam["layers"],
        "num_attention_heads": sam["heads"],
        "global_attn_indexes": sam["global_attn_indexes"],
        # Whatever the key says.
        "downsample_channels": [*sam["downsample_channels"][:-1], reader_width],
    }


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
    layer: dict[str, Any] = {"norm_before_residual": True, **own, **raw["transformer_layer_config"]}
    # Its modules are named as the published ones' of EAGLE-3.
    return AutoConfig.for_model(**layer | {"architectures": [EAGLE3]})
