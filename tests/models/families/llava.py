"""Tiny LLaVAs: CLIP's and SigLIP's towers before four kinds of decoders, and Pixtral's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers import LlavaForConditionalGeneration as HFModel

from mmjax.models.llava.host_inputs import count_image_tokens
from mmjax.models.llava.model import LlavaForConditionalGeneration
from mmjax.models.pixtral.model import PixtralForConditionalGeneration
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.models.families.family import (
    AFFINE,
    DrawnItem,
    Media,
    TinyFamily,
    Variant,
    draw_bytes,
    listed,
)

IMAGE_TOKEN, BREAK_TOKEN, END_TOKEN = 120, 121, 122
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
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
TEXT_CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "gemma3": Gemma3TextConfig,
}
VISION_CONFIGS = {
    "clip": CLIPVisionConfig,
    "siglip": SiglipVisionConfig,
    "pixtral": PixtralVisionConfig,
}
PIXTRAL_SETTINGS: dict[str, Any] = {
    "tower": "pixtral",
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
}
GRIDS = [(3, 4), (1, 1), (5, 2)]
"""Rows and columns of patches of Pixtral's images, by turns."""


def tiny_config(
    *,
    decoder: str = "llama",
    tower: str = "clip",
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **settings: Any,
) -> LlavaConfig:
    """Return a LLaVA of two decoder blocks and three of the tower, with 16 patches an image."""
    return LlavaConfig(
        text_config=TEXT_CONFIGS[decoder](**{**TEXT, **(text or {})}),
        vision_config=VISION_CONFIGS[tower](**{**VISION, **(vision or {})}),
        image_token_index=IMAGE_TOKEN,
        **settings,
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    vision = config.vision_config
    if vision.model_type == "pixtral":
        rows, columns = GRIDS[media.seed % len(GRIDS)]
        ids = [*[IMAGE_TOKEN] * columns, BREAK_TOKEN] * rows
        ids[-1] = END_TOKEN
        shape = (3, rows * vision.patch_size, columns * vision.patch_size)
    else:
        ids = [IMAGE_TOKEN] * count_image_tokens(config)
        shape = (3, vision.image_size, vision.image_size)
    tensors = {"pixel_values": draw_bytes(media.seed, shape), "image_affine": AFFINE}
    return DrawnItem(tensors, ids, np.equal(ids, IMAGE_TOKEN))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it, for either kind of tower."""
    return make_reference_inputs(sample.token_ids, listed(sample))


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    text = {
        "hidden_size": width,
        "head_dim": head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 4),
    }
    return {"text": text}


ROW: dict[str, Any] = {
    "model_class": LlavaForConditionalGeneration,
    "reference_class": HFModel,
    "make_config": tiny_config,
    "resize": resize,
    "draw_item": draw_item,
    "torch_inputs": torch_inputs,
    "word_ids": range(5, IMAGE_TOKEN),
    "published_head_dim": 128,
}
LLAVA = TinyFamily(
    **ROW,
    name="llava",
    served={},
    max_embeds={"image": 16},
    variants={
        "llama": Variant({}, 8),
        "mistral with a window, several states, no biases": Variant(
            {
                "decoder": "mistral",
                "text": {"sliding_window": 9},
                "vision_feature_layer": [-1, 1, -3],
                "multimodal_projector_bias": False,
                "projector_hidden_act": "gelu_pytorch_tanh",
            },
            9,
        ),
        "qwen2, tied, all of siglip": Variant(
            {
                "decoder": "qwen2",
                "tie_word_embeddings": True,
                "tower": "siglip",
                "vision_feature_select_strategy": "full",
                "vision_feature_layer": -1,
                "vision": {"vision_use_head": True},
            },
            9,
        ),
        "gemma 3, the class token too, patches that do not fill the image": Variant(
            {
                "decoder": "gemma3",
                "text": {"head_dim": 16},
                "tie_word_embeddings": True,
                "vision_feature_select_strategy": "full",
                "vision": {"image_size": 31},
            },
            8,
        ),
        "siglip's embedding without its first patch": Variant(
            {"tower": "siglip", "vision_feature_layer": [0]}, 6
        ),
    },
)
PIXTRAL = TinyFamily(
    **{
        **ROW,
        "model_class": PixtralForConditionalGeneration,
        "resize": lambda *sizes: {**PIXTRAL_SETTINGS, **resize(*sizes)},
    },
    name="pixtral",
    served=PIXTRAL_SETTINGS,
    max_embeds={"image": 12},
    variants={
        "mistral": Variant({**PIXTRAL_SETTINGS, "decoder": "mistral"}, 8),
        "two states": Variant({**PIXTRAL_SETTINGS, "vision_feature_layer": [1, -2]}, 7),
    },
)


def tiny_llava_checkpoint(path: Path) -> Path:
    """Write random weights beside the other files of a directory; return it."""
    generation = (path / "generation_config.json").read_bytes()
    LLAVA.make_reference(config=AutoConfig.from_pretrained(path)).save_pretrained(path)
    (path / "generation_config.json").write_bytes(generation)
    return path
