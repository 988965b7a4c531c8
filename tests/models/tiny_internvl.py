"""Tiny random InternVLs: HF's torch model, its weights in ours, and prompts for both."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from mmjax.layers.module import build_abstract
from mmjax.model_source import load_model_config
from mmjax.models.host_inputs import PromptItem
from mmjax.models.internvl.model import InternVLForConditionalGeneration
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.processing.tensors.inputs import PlaceholderRange
from tests import oracle
from tests.kit import fill_by_name

SIDE, CONTEXT, START, END = 32, 125, 126, 127
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def tiny_config(
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Return HF's config: tiles of 4 x 4 patches, 4 embeddings each, before Qwen2's decoder."""
    from transformers import InternVLConfig

    return InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT, **(text or {})},
        vision_config={**VISION, **(vision or {})},
        image_token_id=CONTEXT,
        **{"image_seq_length": 4, "tie_word_embeddings": False, **settings},
    )


def fill(model: Any, seed: int = 0) -> Any:
    """Fill a torch model by its parameters' names, with norms around 1; return it."""
    fill_by_name(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter += 1.0
    return model


def random_internvl(config: Any, seed: int = 0) -> Any:
    """Return HF's model of a config, whose `generate` never ends a text."""
    from transformers import GenerationConfig
    from transformers import InternVLForConditionalGeneration as Reference

    model = fill(Reference(config).eval(), seed)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def paged_internvl(reference: Any, max_len: int = 256) -> PagedModel:
    """Return our model with the weights of `random_internvl`'s."""
    model_class, config = InternVLForConditionalGeneration, reference.config
    _, abstract = build_abstract(model_class, config, dtype=jnp.float32)
    params = oracle.params_of(reference, abstract, model_class.rules(config))
    return PagedModel(model_class, config, params, max_len)


def draw_sample(config: Any, parts: Sequence[Any], name: str = "pixel_values") -> Sample:
    """Return a prompt: a list is of token ids, a number of random tiles an item under `name`."""
    spec_side = config.vision_config.image_size[0]
    per_tile = int((spec_side // config.vision_config.patch_size[0] * config.downsample_ratio) ** 2)
    ids: list[int] = []
    items = []
    for number, part in enumerate(parts):
        if not isinstance(part, int):
            ids += part
            continue
        rng = np.random.default_rng([number, part])
        pixels = rng.normal(size=(part, 3, spec_side, spec_side)).astype(np.float32)
        place = PlaceholderRange(offset=len(ids) + 1, length=part * per_tile)
        items.append(PromptItem(place, {name: pixels}))
        ids += [START, *[CONTEXT] * part * per_tile, END]
    return Sample(token_ids=np.array(ids, np.int32), items=items)


def torch_inputs(sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it: videos are pictures there."""
    inputs = oracle.torch_inputs(sample)
    del inputs["token_type_ids"]  # a Gemma's
    return {"pixel_values" if "pixel" in name else name: value for name, value in inputs.items()}


def words(seed: int, length: int) -> list[int]:
    """Return random tokens of text."""
    return np.random.default_rng(seed).integers(1, CONTEXT, length).tolist()


# ---- the original layout ------------------------------------------------------------------------

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
