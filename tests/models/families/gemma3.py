"""Tiny Gemma 3s: images of one crop and of several, attention in both directions inside them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import Gemma3Config
from transformers import Gemma3ForConditionalGeneration as HFModel

from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.kit import fill_by_name, gemma_tokenizer, tiny_gemma3_config
from tests.models.families.family import (
    AFFINE,
    DrawnItem,
    Media,
    TinyFamily,
    Variant,
    draw_bytes,
    joined,
)

SHORT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
NUM_CROPS = (1, 2, 1, 3)
"""By turns."""


def tiny_config(
    *,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    tokens_per_image: int = 4,
    is_tied: bool = True,
) -> Gemma3Config:
    """Return a config of width 32, two sliding layers and a global one."""
    config = tiny_gemma3_config(
        gemma_tokenizer(),
        text={**SHORT, **(text or {})},
        vision=vision,
        tokens_per_image=tokens_per_image,
    )
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = is_tied
    return config


def fill(model: Any) -> None:
    """Fill with random values; attention is sharp, and a tied head does not say its own token."""
    fill_by_name(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter += 1.0
            elif "embed_tokens" in name:
                parameter *= 0.3


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image: each crop's tokens stand between marks."""
    side, crops = config.vision_config.image_size, NUM_CROPS[media.seed % len(NUM_CROPS)]
    soft = config.image_token_index
    one = [config.boi_token_index, *[soft] * config.mm_tokens_per_image, config.eoi_token_index]
    ids = one * crops
    pixels = draw_bytes(media.seed, (crops, 3, side, side))
    return DrawnItem({"pixel_values": pixels, "image_affine": AFFINE}, ids, np.equal(ids, soft))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it."""
    kinds = torch.tensor(sample.is_embed, dtype=torch.long)[None]
    return make_reference_inputs(sample.token_ids, joined(sample)) | {"token_type_ids": kinds}


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    text = {
        "hidden_size": width,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 2),
    }
    return {"text": text}


GEMMA3 = TinyFamily(
    name="gemma3",
    model_class=Gemma3ForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    served={},
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    fill=fill,
    word_ids=range(5, 250),
    published_head_dim=256,
    max_embeds={"image": 12},
    variants={
        "plain": Variant({}, 10),
        "window inside an image": Variant(
            {"text": {"sliding_window": 3}, "tokens_per_image": 16}, 10
        ),
        "head of its own": Variant({"is_tied": False}, 10),
        "biases and linear rope": Variant(
            {"text": {"attention_bias": True, "rope_parameters": LINEAR}}, 10
        ),
        "patches that fill no pool": Variant({"vision": {"image_size": 75}}, 10),
        "wide heads": Variant(
            {"text": {"head_dim": 24, "num_attention_heads": 2, "num_key_value_heads": 2}}, 10
        ),
        "one key head": Variant({"text": {"num_attention_heads": 2, "num_key_value_heads": 1}}, 10),
    },
)
