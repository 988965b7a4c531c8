"""InternVL's original layout, of the tensors and the configuration that HF's layout has."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmjax.models.model_source import load_model_config

ORIGINAL_NAMES = {
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_model.",
    "model.multi_modal_projector.layer_norm.": "mlp1.0.",
    "model.multi_modal_projector.linear_1.": "mlp1.1.",
    "model.multi_modal_projector.linear_2.": "mlp1.3.",
    ".cls_token": ".class_embedding",
    ".position_embeddings": ".position_embedding",
    ".patch_embeddings.projection.": ".patch_embedding.",
    ".encoder.layer.": ".encoder.layers.",
    ".attention.projection_layer.": ".attn.proj.",
    ".attention.": ".attn.",
    ".layernorm_before.": ".norm1.",
    ".layernorm_after.": ".norm2.",
    ".lambda_": ".ls",
}
INTERNLM2_NAMES = {
    "language_model.lm_head.": "language_model.output.",
    ".embed_tokens.": ".tok_embeddings.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".self_attn.": ".attention.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
}


def to_original(config: Any, tensors: Mapping[str, Any], *, is_internlm2: bool) -> dict[str, Any]:
    """Return the tensors of HF's module under the names of the original's files, fused as there."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in ORIGINAL_NAMES.items():
            name = name.replace(old, new)
        if is_internlm2 and name.startswith("language_model."):
            for old, new in INTERNLM2_NAMES.items():
                name = name.replace(old, new)
        renamed[name] = tensor
    num_groups = config.text_config.num_key_value_heads
    for name in [name for name in renamed if "q_proj" in name]:
        parts = [renamed[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        if name.startswith("vision_model."):
            fused, whole = name.replace("q_proj", "qkv"), torch.cat(parts)
        elif is_internlm2:
            grouped = [part.reshape(num_groups, -1, *part.shape[1:]) for part in parts]
            fused = name.replace("q_proj", "wqkv")
            whole = torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])
        else:
            continue
        for part in "qkv":
            del renamed[name.replace("q_proj", f"{part}_proj")]
        renamed[fused] = whole
    return renamed


def original_config(config: Any, path: Path, *, is_internlm2: bool = False, **settings: Any) -> Any:
    """Write HF's configuration as the original spells it; return it as mmjax reads it."""
    text, vision = config.text_config, config.vision_config
    llm = {key: value for key, value in text.to_dict().items() if key != "transformers_version"}
    if is_internlm2:
        rope = {"rope_theta": llm.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
        llm |= {**rope, "model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"]}
        llm["bias"] = llm.pop("attention_bias")
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "downsample_ratio": config.downsample_ratio,
        "force_image_size": vision.image_size[0],
        "ps_version": "v2",
        "select_layer": config.vision_feature_layer,
        "llm_config": llm,
        "vision_config": {
            **{key: getattr(vision, key) for key in same},
            "model_type": "intern_vit_6b",
            "image_size": vision.image_size[0],
            "patch_size": vision.patch_size[0],
            "norm_type": vision.norm_type,
            "qkv_bias": vision.attention_bias,
            "qk_normalization": vision.use_qk_norm,
        },
        **settings,
    }
    (path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return load_model_config(str(path)).hf_config
