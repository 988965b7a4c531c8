"""Published names and shapes of families that transformers has no class for.

DeepSeek-VL2's and Qwen-VL's are listed as the published code makes them; Molmo's are those of the
tiny checkpoints, repeated to the published depth. Of Qwen3-VL's experts the published files have
the transposed, and some of LFM3-VL's modules have other names there.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    Lfm3VlForConditionalGeneration,
    PreTrainedConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from mmjax.models.model_source import load_model_config
from mmjax.weights.files.safetensors import open_safetensors
from tests.families.directories import GOLDEN_MODELS

TILES = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (1, 9), (9, 1), (3, 3)]
VIT_WIDTH, VIT_INNER, VIT_BLOCKS = 1024, 4096, 23


def read_deepseek_vl2(size: str, **language: Any) -> Any:
    """Read the tiny stand-in's config.json with a published size in it."""
    config = json.loads((GOLDEN_MODELS / f"deepseek_vl2_{size}" / "config.json").read_text())
    config["language_config"].update(language)
    # What the published files leave out is what the class says.
    for key in ("image_size", "patch_size", "width", "layers"):
        config["vision_config"].pop(key, None)
    config["vision_config"] |= {"layers": 27, "patch_size": 14, "width": 1152}
    config["projector_config"] = {
        "model_type": "mlp_projector",
        "n_embed": language["hidden_size"],
    }
    config["candidate_resolutions"] = [[384 * x, 384 * y] for x, y in TILES]
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return load_model_config(folder).hf_config


def list_deepseek_vl2(
    config: Any, vision: dict[str, int], *, has_pool: bool = True
) -> dict[str, tuple[int, ...]]:
    """Return the published names and shapes."""
    return dict(list_tensors(config.get_text_config(), vision, has_pool=has_pool))


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def list_tensors(text: Any, vision: dict[str, int], *, has_pool: bool) -> Shapes:
    """Yield the published names and shapes."""
    width = text.hidden_size
    yield "image_newline", (width,)
    yield "view_seperator", (width,)
    yield from list_linear("projector.layers.0", vision["width"] * 4, width)
    yield from list_linear("projector.layers.2", width, width)
    yield from list_tower(vision, has_pool=has_pool)
    yield "language.lm_head.weight", (text.vocab_size, width)
    yield "language.model.embed_tokens.weight", (text.vocab_size, width)
    yield "language.model.norm.weight", (width,)
    for number in range(text.num_hidden_layers):
        layer = f"language.model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        yield from list_attention(f"{layer}.self_attn", text)
        if number == 0:
            yield from list_mlp(f"{layer}.mlp", width, text.intermediate_size)
        else:
            yield from list_experts(f"{layer}.mlp", text)


def list_linear(name: str, inputs: int, outputs: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def list_norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def list_tower(vision: dict[str, int], *, has_pool: bool) -> Shapes:
    width, patch = vision["width"], vision["patch_size"]
    inner, num_patches = int(width * 3.7362), (vision["image_size"] // patch) ** 2
    yield "vision.patch_embed.proj.weight", (width, 3, patch, patch)
    yield "vision.patch_embed.proj.bias", (width,)
    yield "vision.pos_embed", (1, num_patches, width)
    yield from list_norm("vision.norm", width)
    for number in range(vision["layers"]):
        block = f"vision.blocks.{number}"
        yield from list_norm(f"{block}.norm1", width)
        yield from list_norm(f"{block}.norm2", width)
        yield from list_linear(f"{block}.attn.qkv", width, 3 * width)
        yield from list_linear(f"{block}.attn.proj", width, width)
        yield from list_linear(f"{block}.mlp.fc1", width, inner)
        yield from list_linear(f"{block}.mlp.fc2", inner, width)
    if has_pool:
        pool = "vision.attn_pool"
        yield f"{pool}.latent", (1, 1, width)
        yield from list_norm(f"{pool}.norm", width)
        yield from list_linear(f"{pool}.q", width, width)
        yield from list_linear(f"{pool}.kv", width, 2 * width)
        yield from list_linear(f"{pool}.proj", width, width)
        yield from list_linear(f"{pool}.mlp.fc1", width, inner)
        yield from list_linear(f"{pool}.mlp.fc2", inner, width)


def list_attention(name: str, text: Any) -> Shapes:
    width, heads = text.hidden_size, text.num_attention_heads
    if not text.use_mla:
        yield from ((f"{name}.{one}_proj.weight", (width, width)) for one in "qkvo")
        return
    nope, rope, value = text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim
    rank = text.kv_lora_rank
    yield f"{name}.q_proj.weight", (heads * (nope + rope), width)
    yield f"{name}.kv_a_proj_with_mqa.weight", (rank + rope, width)
    yield f"{name}.kv_a_layernorm.weight", (rank,)
    yield f"{name}.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{name}.o_proj.weight", (width, heads * value)


def list_mlp(name: str, width: int, inner: int) -> Shapes:
    yield f"{name}.gate_proj.weight", (inner, width)
    yield f"{name}.up_proj.weight", (inner, width)
    yield f"{name}.down_proj.weight", (width, inner)


def list_experts(name: str, text: Any) -> Shapes:
    width, inner = text.hidden_size, text.moe_intermediate_size
    yield f"{name}.gate.weight", (text.n_routed_experts, width)
    if text.topk_method == "noaux_tc":
        yield f"{name}.gate.e_score_correction_bias", (text.n_routed_experts,)
    yield from list_mlp(f"{name}.shared_experts", width, text.n_shared_experts * inner)
    for number in range(text.n_routed_experts):
        yield from list_mlp(f"{name}.experts.{number}", width, inner)


def published_shape(name: str, config: Any) -> tuple[int, ...]:
    """Return a tensor's shape by the published code, of the last parts of its name."""
    width, inner = config.hidden_size, config.intermediate_size // 2
    key_width = (
        width
        // config.num_attention_heads
        * (config.num_key_value_heads or config.num_attention_heads)
    )
    fused, pooled = width + 2 * key_width, 2 * VIT_WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        r"wte\.embedding$": (config.embedding_size, width),
        r"wte\.new_embedding$": (128, width),
        r"transformer\.ff_out\.weight$": (config.embedding_size, width),
        r"blocks\.\d+\.att_proj\.weight$": (fused, width),
        r"blocks\.\d+\.att_proj\.bias$": (fused,),
        r"blocks\.\d+\.attn_out\.weight$": (width, width),
        r"blocks\.\d+\.ff_proj\.weight$": (2 * inner, width),
        r"blocks\.\d+\.ff_out\.weight$": (width, inner),
        r"\.k_norm\.weight$": (key_width,),
        r"\.(q_norm|attn_norm|ff_norm|ln_f)\.weight$": (width,),
        r"image_pooling_2d\.w[qkv]\.weight$": (VIT_WIDTH, pooled),
        r"image_projector\.w[13]\.weight$": (inner, VIT_WIDTH),
        r"image_projector\.w2\.weight$": (width, inner),
        r"\.pad_embed$": (2, pooled),
        r"\.patch_embedding\.weight$": (VIT_WIDTH, 588),
        r"\.positional_embedding$": (577, VIT_WIDTH),
        r"feed_forward\.w1\.weight$": (VIT_INNER, VIT_WIDTH),
        r"feed_forward\.w1\.bias$": (VIT_INNER,),
        r"feed_forward\.w2\.weight$": (VIT_WIDTH, VIT_INNER),
        r"(attention|image_pooling_2d)\.w[qkvo]\.weight$": (VIT_WIDTH, VIT_WIDTH),
        r"\.bias$|_ln\.weight$|class_embedding$|(attention|ffn)_norm\.weight$": (VIT_WIDTH,),
    }
    return next(shape for pattern, shape in shapes.items() if re.search(pattern, name))


def list_molmo(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the tiny checkpoint's tensors at the published depth and widths."""
    names = set()
    tiny = "molmo_7b_o" if config.norm_after else "molmo_7b_d"
    with open_safetensors(GOLDEN_MODELS / tiny) as tensors:
        for name in tensors:
            depth = VIT_BLOCKS if "resblocks" in name else config.num_hidden_layers
            names |= {re.sub(r"blocks\.\d+\.", f"blocks.{i}.", name) for i in range(depth)}
    return {name: published_shape(name, config) for name in sorted(names)}


D, F, W, M = 4096, 22016 // 2, 1664, 8192
"""Widths of the decoder, of half an MLP, of the tower, of the tower's MLP."""
BLOCK = {
    "ln_1": (W,),
    "ln_2": (W,),
    "attn.in_proj": (3 * W, W),
    "attn.out_proj": (W, W),
    "mlp.c_fc": (M, W),
    "mlp.c_proj": (W, M),
}
VISUAL = {
    "conv1.weight": (W, 3, 14, 14),
    "positional_embedding": (256, W),
    "ln_pre.weight": (W,),
    "ln_pre.bias": (W,),
    "attn_pool.query": (256, D),
    "attn_pool.pos_embed": (256, D),
    "attn_pool.kv_proj.weight": (D, W),
    "attn_pool.attn.in_proj_weight": (3 * D, D),
    "attn_pool.attn.in_proj_bias": (3 * D,),
    "attn_pool.attn.out_proj.weight": (D, D),
    "attn_pool.attn.out_proj.bias": (D,),
    **{
        f"{norm}.{part}": (D,)
        for norm in ("attn_pool.ln_q", "attn_pool.ln_kv", "ln_post")
        for part in ("weight", "bias")
    },
    "proj": (D, D),
}
LAYER = {
    "ln_1.weight": (D,),
    "ln_2.weight": (D,),
    "attn.c_attn.weight": (3 * D, D),
    "attn.c_attn.bias": (3 * D,),
    "attn.c_proj.weight": (D, D),
    "mlp.w1.weight": (F, D),
    "mlp.w2.weight": (F, D),
    "mlp.c_proj.weight": (D, F),
}


def list_qwen_vl(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of Qwen-VL-Chat's files, 48 blocks and 32 layers."""
    del config
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (151936, D),
        "transformer.ln_f.weight": (D,),
        "lm_head.weight": (151936, D),
    }
    shapes |= {f"transformer.visual.{name}": shape for name, shape in VISUAL.items()}
    for number in range(48):
        for name, shape in BLOCK.items():
            block = f"transformer.visual.transformer.resblocks.{number}.{name}"
            shapes |= {f"{block}.weight": shape, f"{block}.bias": shape[:1]}
    for number in range(32):
        shapes |= {f"transformer.h.{number}.{name}": shape for name, shape in LAYER.items()}
    return shapes


def read_qwen_vl(**changes: Any) -> Any:
    """Read the tiny stand-in's config.json with the published sizes in it."""
    raw = json.loads((GOLDEN_MODELS / "qwen_vl_chat" / "config.json").read_text())
    return PreTrainedConfig(**{**raw, **changes})


def list_qwen3_vl_moe(config: Any) -> dict[str, tuple[int, ...]]:
    """Return HF's names and shapes, experts as `[experts, in, out]`."""
    with torch.device("meta"):
        tensors = Qwen3VLMoeForConditionalGeneration(config).state_dict()
    return {
        name: tuple((tensor.swapaxes(1, 2) if ".experts." in name else tensor).shape)
        for name, tensor in tensors.items()
    }


def list_lfm3_vl(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of files: of HF's module, but for a few modules' names.

    HF: conversion_mapping.py, `lfm3` and `lfm3_vl_vision`.
    """
    with torch.device("meta"):
        tensors = Lfm3VlForConditionalGeneration(config).state_dict()
    found = {}
    for name, tensor in tensors.items():
        if "vision_tower" in name:
            told = re.sub(r"\.([qk])_norm\.", r".\1_layernorm.", name)
            told = told.replace(".patch_embed.", ".patchifier.")
        else:
            told = name.replace(".self_attn.g_proj.", ".self_attn.gate_proj.")
        found[told] = tuple(tensor.shape)
    if config.tie_word_embeddings:
        del found["lm_head.weight"]
    return found


def list_molmo2(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the published names and shapes: 25 blocks of the tower, fused projections."""
    return dict(list_molmo2_tensors(config))


def list_molmo2_tensors(config: Any) -> Shapes:
    """Yield the published names and shapes."""
    text, width = config.text_config, config.text_config.hidden_size
    yield "lm_head.weight", (text.vocab_size, width)
    yield "model.transformer.wte.embedding", (text.vocab_size, width)
    yield "model.transformer.wte.new_embedding", (128, width)
    yield "model.transformer.ln_f.weight", (width,)
    heads, key_heads = (
        text.num_attention_heads * text.head_dim,
        text.num_key_value_heads * text.head_dim,
    )
    is_wide = text.qk_norm_type == "olmo"
    for number in range(text.num_hidden_layers):
        block = f"model.transformer.blocks.{number}."
        yield f"{block}attn_norm.weight", (width,)
        yield f"{block}ff_norm.weight", (width,)
        yield f"{block}self_attn.att_proj.weight", (heads + 2 * key_heads, width)
        yield f"{block}self_attn.attn_out.weight", (width, heads)
        yield f"{block}self_attn.q_norm.weight", (heads if is_wide else text.head_dim,)
        yield f"{block}self_attn.k_norm.weight", (key_heads if is_wide else text.head_dim,)
        yield f"{block}mlp.ff_proj.weight", (2 * text.intermediate_size, width)
        yield f"{block}mlp.ff_out.weight", (width, text.intermediate_size)
    vit = "model.vision_backbone.image_vit."
    yield f"{vit}positional_embedding", (729, 1152)
    yield from list_biased(f"{vit}patch_embedding", 588, 1152)
    for number in range(25):
        block = f"{vit}transformer.resblocks.{number}."
        for name in ("wq", "wk", "wv", "wo"):
            yield from list_biased(f"{block}attention.{name}", 1152, 1152)
        yield from list_biased(f"{block}feed_forward.w1", 1152, 4304)
        yield from list_biased(f"{block}feed_forward.w2", 4304, 1152)
        for name in ("attention_norm", "ffn_norm"):
            yield from list_norm(f"{block}{name}", 1152)
    for name in ("wq", "wk", "wv"):
        yield from list_biased(f"model.vision_backbone.image_pooling_2d.{name}", 2304, 1152)
    yield from list_biased("model.vision_backbone.image_pooling_2d.wo", 1152, 1152)
    inner = config.adapter_config.intermediate_size
    projector = "model.vision_backbone.image_projector."
    yield f"{projector}w1.weight", (inner, 1152)
    yield f"{projector}w3.weight", (inner, 1152)
    yield f"{projector}w2.weight", (width, inner)


def list_biased(name: str, inputs: int, outputs: int) -> Shapes:
    """Yield a linear layer's tensors."""
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)
