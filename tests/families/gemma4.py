"""Tiny Gemma 4s: images and videos of any grid, layers that share caches, parts of tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import Gemma4Config
from transformers import Gemma4ForConditionalGeneration as HFModel

from mmjax.models.gemma4.model import Gemma4ForConditionalGeneration
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes
from tests.kit import fill_by_name

IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN, START, END = 95, 94, 93, 92, 91
SLIDING, GLOBAL = "sliding_attention", "full_attention"
TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, GLOBAL, SLIDING, SLIDING, GLOBAL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 12,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 1024,
}
"""The small ones': the last two layers read the caches of the two before them."""
LARGE: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
"""What the large ones have in place of it."""
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 64,
}
GRIDS = {"image": [(9, 3), (3, 6), (6, 6), (3, 3)], "video": [(6, 3), (3, 3), (3, 6), (9, 3)]}
"""Columns and rows of patches, by turns."""
NUM_PATCHES = 36
"""Of an image with its padding."""
NUM_FRAMES = (2, 1, 3)


def tiny_config(
    *,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    is_tied: bool = True,
) -> Gemma4Config:
    """Return a config of width 32."""
    text_config = {**TEXT, **(text or {}), "tie_word_embeddings": is_tied}
    config = Gemma4Config(
        text_config=text_config,
        vision_config={**VISION, **(vision or {})},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        audio_token_id=AUDIO_TOKEN,
        boi_token_id=START,
        eoi_token_id=END,
        tie_word_embeddings=is_tied,
    )
    config.architectures = ["Gemma4ForConditionalGeneration"]
    return config


def fill(model: Any) -> None:
    """Fill with random values; norms near 1, a tied head does not say its own token."""
    fill_by_name(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                # Scores have no scale of their own.
                parameter += 0.5 if "q_norm" in name or "k_norm" in name else 1.0
            elif name.endswith("embed_tokens.weight"):
                parameter *= 0.3
        for name, buffer in model.named_buffers():
            seed = sum(name.encode())
            if name.endswith("layer_scalar"):
                buffer.fill_(0.5 + seed % 7 / 10)
            elif name.endswith(("std_bias", "std_scale")):
                values = np.random.default_rng(seed).normal(0.5, 0.3, len(buffer))
                buffer.copy_(torch.tensor(values))
            elif name.endswith(("_min", "_max")):
                sign = -1 if name.endswith("_min") else 1
                buffer.fill_(sign * (0.4 + seed % 5 / 10))


def draw_places(columns: int, rows: int) -> np.ndarray:
    """Return int64[NUM_PATCHES, 2]: column and row of each patch, -1 behind them."""
    grid = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), axis=-1).reshape(-1, 2)
    return np.pad(grid, ((0, NUM_PATCHES - len(grid)), (0, 0)), constant_values=-1)


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image or video, each with marks around what takes embeddings."""
    vision = config.vision_config
    columns, rows = GRIDS[media.modality][media.seed % 4]
    is_video = media.modality == "video"
    num_frames = NUM_FRAMES[media.seed % 3] if is_video else 1
    pixels = draw_bytes(media.seed, (num_frames, NUM_PATCHES, 3 * vision.patch_size**2))
    places = np.stack([draw_places(columns, rows)] * num_frames)
    pixels[places[:, :, 0] < 0] = 0
    num_embeds = columns * rows // vision.pooling_kernel_size**2
    if not is_video:
        tensors = {
            "pixel_values": pixels[0],
            "image_position_ids": places[0],
            "image_affine": AFFINE,
        }
        return DrawnItem(tensors, [IMAGE_TOKEN] * num_embeds, before=[START], after=[END])
    tensors = {
        "pixel_values_videos": pixels,
        "video_position_ids": places,
        "num_frames_per_video": np.array(num_frames),
        "video_affine": AFFINE,
    }
    ids: list[int] = []
    for number in range(num_frames):
        ids += [5 + number, START, *[VIDEO_TOKEN] * num_embeds, END]
    return DrawnItem(tensors, ids, np.equal(ids, VIDEO_TOKEN))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it."""
    items = [make_pixels(item.tensors, colours_last=True) for item in sample.items]
    data = {}
    for name in dict.fromkeys(name for item in items for name in item):
        rows = [item[name] for item in items if name in item]
        # HF stacks pictures, and joins the frames of all videos.
        data[name] = np.concatenate(rows) if rows[0].ndim == 3 else np.stack(rows)
    inputs = make_reference_inputs(sample.token_ids, data)
    ids = inputs["input_ids"]
    kinds = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    return inputs | {"mm_token_type_ids": kinds}


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    text = {
        "hidden_size": width,
        "head_dim": head_dim,
        "global_head_dim": 2 * head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 2),
    }
    return {"text": text}


CLIPPED = {"use_clipped_linears": True, "standardize": True}
TINY = TinyFamily(
    name="gemma4",
    model_class=Gemma4ForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    served={},
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    fill=fill,
    word_ids=range(10, 90),
    published_head_dim=256,
    max_embeds={"image": 4, "video": 9},
    variants={
        "small": Variant({}, 7),
        "large": Variant({"text": LARGE}, 7),
        "bounds and a standard": Variant({"vision": CLIPPED, "is_tied": False}, 7),
        "parts without shared caches": Variant(
            {"text": {"num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"}}, 7
        ),
    },
)
