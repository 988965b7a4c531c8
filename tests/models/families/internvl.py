"""Tiny InternVLs: images of one to three tiles, videos of frames."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from transformers import InternVLConfig
from transformers import InternVLForConditionalGeneration as HFModel

from mmjax.models.internvl.model import InternVLForConditionalGeneration
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from tests.models.families.family import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes
from tests.oracle import fill_with_unit_norms

SIDE, CONTEXT, START, END = 32, 125, 126, 127
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
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
NUM_TILES = {"image": (3, 1, 2), "video": (5, 4, 2)}
"""By turns; an image of several has a thumbnail."""
NAMES = {"image": "pixel_values", "video": "pixel_values_videos"}


def tiny_config(
    *,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Return HF's config: tiles of 4 x 4 patches, 4 embeddings each, before Qwen2's decoder."""
    return InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT, **(text or {})},
        vision_config={**VISION, **(vision or {})},
        image_token_id=CONTEXT,
        **{"image_seq_length": 4, "tie_word_embeddings": False, **settings},
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image or video."""
    side = config.vision_config.image_size[0]
    num_patches = side // config.vision_config.patch_size[0]
    per_tile = int((num_patches * config.downsample_ratio) ** 2)
    tiles = NUM_TILES[media.modality][media.seed % 3]
    pixels = draw_bytes([media.seed, tiles], (tiles, 3, side, side))
    return DrawnItem(
        {NAMES[media.modality]: pixels, f"{media.modality}_affine": AFFINE},
        [CONTEXT] * tiles * per_tile,
        before=[START],
        after=[END],
    )


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it: videos are images there."""
    pixels = [value for item in sample.items for value in make_pixels(item.tensors).values()]
    data = {"pixel_values": np.concatenate(pixels)} if pixels else {}
    return make_reference_inputs(sample.token_ids, data)


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    text = {
        "model_type": "qwen3",
        "hidden_size": width,
        "head_dim": head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 4),
    }
    return {"text": text}


INTERNVL = TinyFamily(
    name="internvl",
    model_class=InternVLForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    served={"text": {"model_type": "qwen3", "head_dim": 16}},
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(1, CONTEXT),
    published_head_dim=128,
    max_embeds={"image": 12, "video": 20},
    fill=partial(fill_with_unit_norms, sharpness=1.4),
    variants={
        "qwen2": Variant({}, 8),
        "qwen2, tied, squares of four": Variant(
            {
                "vision": {"attention_bias": True, "use_mean_pooling": False},
                "tie_word_embeddings": True,
                "downsample_ratio": 0.25,
                "projector_hidden_act": "relu",
            },
            9,
        ),
        "llama, 6b": Variant(
            {
                "text": {"model_type": "llama", "rms_norm_eps": 1e-5},
                "vision": {"norm_type": "rms_norm", "use_qk_norm": True},
            },
            8,
        ),
        "qwen3, state before the last": Variant(
            {
                "text": {"model_type": "qwen3", "head_dim": 12},
                "vision_feature_layer": -2,
                "vision": {"use_mean_pooling": False, "use_mask_token": True},
            },
            7,
        ),
        "first state, no squares": Variant({"downsample_ratio": 1.0, "vision_feature_layer": 1}, 7),
    },
)
