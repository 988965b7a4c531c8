"""Tiny Aya Visions and Command A Visions: tiles of a picture, and the whole, before Cohere's."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
)
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from mmjax.models.aya_vision import model as ours
from tests.families.directories import make_tokenizer, write_directory
from tests.families.family import Family, written
from tests.families.published import THREE_LAYOUTS, Published
from tests.families.sizes import DECODER, NO_KEYS, TOWER, Keys, fit_text
from tests.families.tiny import (
    AFFINE,
    DrawnItem,
    Media,
    TinyFamily,
    Variant,
    draw_bytes,
    joined_inputs,
)
from tests.families.without_torchvision import take_image_processor
from tests.oracle import fill_with_unit_norms

PATCH_TOKEN, TILE_TOKEN = 125, 124
TEXT: dict[str, Any] = {
    **DECODER,
    "model_type": "cohere2",
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    # NOTE: HF's class leaves the scale out; tests/models/test_aya_vision.py compares it.
    "logit_scale": 1.0,
}
VISION: dict[str, Any] = {
    **TOWER,
    "model_type": "siglip_vision_model",
    "image_size": 32,
    "patch_size": 8,
    "vision_use_head": False,
}
NUM_TILES = (3, 1, 2)
"""By turns, the whole included."""


def tiny_config(
    *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, **settings: Any
) -> AyaVisionConfig:
    """Return HF's config: tiles of 4 x 4 patches, 4 embeddings each."""
    settings = {"alignment_intermediate_size": 56, **settings}
    return AyaVisionConfig(
        text_config={**TEXT, **text},
        vision_config={**VISION, **vision},
        image_token_index=PATCH_TOKEN,
        **settings,
        architectures=["AyaVisionForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    tiles, side = NUM_TILES[media.seed % len(NUM_TILES)], config.vision_config.image_size
    per_tile = (side // config.vision_config.patch_size // config.downsample_factor) ** 2
    ids = [TILE_TOKEN, *[PATCH_TOKEN] * per_tile] * tiles
    pixels = draw_bytes(media.seed, (tiles, 3, side, side))
    tensors = {"pixel_values": pixels, "image_affine": AFFINE}
    return DrawnItem(tensors, ids, np.equal(ids, PATCH_TOKEN))


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder, whose heads share the width."""
    heads = {"num_attention_heads": width // head_dim, "num_key_value_heads": 1}
    return {"text": {"hidden_size": width, **heads}}


fill = partial(fill_with_unit_norms, sharpness=1.4)
TINY = TinyFamily(
    name="aya_vision",
    model_class=ours.AyaVisionForConditionalGeneration,
    reference_class=AyaVisionForConditionalGeneration,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=joined_inputs,
    word_ids=range(1, TILE_TOKEN),
    published_head_dim=128,
    max_embeds={"image": 12},
    fill=fill,
    variants={
        "cohere2": Variant({}, 9),
        "cohere, a head of its own, a state before the last": Variant(
            {
                "text": {"model_type": "cohere", "attention_bias": True},
                "tie_word_embeddings": False,
                "vision_feature_layer": -2,
                "downsample_factor": 4,
            },
            8,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


IMAGE, PATCH = "<image>", "<|IMG_PATCH|>"
SIDE = 56
FEWER: dict[str, Any] = {"max_patches": 3, "min_patches": 2}


def write_files(path: Path) -> Path:
    roles = [f"<|{role}_TOKEN|>" for role in ("USER", "CHATBOT", "SYSTEM")]
    turns = ["<|START_OF_TURN_TOKEN|>", *roles]
    tiles = [f"TILE_{number}" for number in range(1, 13)]
    images = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", PATCH, "TILE", *tiles, "TILE_GLOBAL"]
    tokenizer = make_tokenizer(
        [*turns, *images], bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", pad="<PAD>"
    )
    config = tiny_config(
        text=fit_text(tokenizer, hidden_size=64),
        vision={"image_size": SIDE, "patch_size": 14},
    )
    config.image_token_index = tokenizer.convert_tokens_to_ids(PATCH)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": False,
            "size": {"height": SIDE, "width": SIDE},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        processor_config={
            "img_size": SIDE,
            "patch_size": 28,
            "processor_class": "AyaVisionProcessor",
        },
    )


TURN = "<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>"
ASKED, SAID, TOLD = (TURN.format(role=role) for role in ("USER", "CHATBOT", "SYSTEM"))
AYA_VISION = Family(
    **written(
        TINY,
        write_files,
        AyaVisionProcessor,
        GotOcr2ImageProcessorPil,
        img_size=SIDE,
        patch_size=28,
    ),
    needless_files=frozenset({"tokenizer_config.json"}),
    published=Published(layouts=THREE_LAYOUTS),
    rendered=(
        f"{ASKED}{IMAGE}what is it<|END_OF_TURN_TOKEN|>{SAID}a car<|END_OF_TURN_TOKEN|>"
        f"{ASKED}which color<|END_OF_TURN_TOKEN|>{SAID}"
    ),
    with_system=("", f"{TOLD}be short<|END_OF_TURN_TOKEN|>"),
    probed=("vision_tower.encoder.layers.1", "multi_modal_projector"),
    placeholder=IMAGE,
    lowering_kwargs={"max_patches": 2},
    extra_kwargs=({}, FEWER, {"crop_to_patches": False}),
    operator_kwargs=({"max_patches": 11}, {"crop_to_patches": False}),
    contradictions=(
        ("processor_config", {"patch_size": 14}, "`img_size` 56 and .* give 4 tokens a side"),
        ("processor_config", {"img_size": None}, "`img_size` 364 and .* but config.json 2"),
        ("preprocessor_config", {"size": {"height": 28, "width": 28}}, "`size` .*28.*, but"),
        ("config", {"image_token_index": 7}, "but `image_token_id` of config.json is 7"),
    ),
)


# ---- Command A Vision ----------------------------------------------------------------------------


def tiny_cohere2_config(
    *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, **settings: Any
) -> Cohere2VisionConfig:
    """Return HF's config, with four embeddings a tile."""
    settings = {"alignment_intermediate_size": 56, **settings}
    config = Cohere2VisionConfig(
        text_config={**TEXT, **text},
        vision_config={**VISION, **vision},
        image_token_id=PATCH_TOKEN,
        **settings,
    )
    config.architectures = ["Cohere2VisionForConditionalGeneration"]
    return config


COHERE2_TINY = replace(
    TINY,
    name="cohere2_vision",
    model_class=ours.Cohere2VisionForConditionalGeneration,
    reference_class=Cohere2VisionForConditionalGeneration,
    make_config=tiny_cohere2_config,
    variants={
        "plain": Variant({}, 10),
        "squares of four, a head of its own": Variant(
            {"downsample_factor": 4, "tie_word_embeddings": False}, 10
        ),
    },
)


def write_cohere2_files(path: Path) -> Path:
    roles = [f"<|{role}_TOKEN|>" for role in ("USER", "CHATBOT", "SYSTEM")]
    named = {
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "image_token": PATCH,
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }
    tokenizer = make_tokenizer(
        ["<|START_OF_TURN_TOKEN|>", *roles, *named.values()],
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        pad="<PAD>",
        named=named,
    )
    config = tiny_cohere2_config(
        text=fit_text(tokenizer, hidden_size=64),
        vision={"image_size": SIDE, "patch_size": 14},
    )
    config.image_token_id = tokenizer.convert_tokens_to_ids(PATCH)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "Cohere2VisionImageProcessor",
            "patch_size": 2,
            "size": {"height": SIDE, "width": SIDE},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        processor_config={"processor_class": "Cohere2VisionProcessor"},
    )


COHERE2_VISION = replace(
    AYA_VISION,
    **written(
        COHERE2_TINY,
        write_cohere2_files,
        Cohere2VisionProcessor,
        take_image_processor("cohere2_vision", "Cohere2VisionImageProcessor"),
    ),
    needless_files=frozenset({"tokenizer_config.json", "processor_config.json"}),
    published=Published(),
    rendered=AYA_VISION.rendered.replace(IMAGE, PATCH),
    placeholder=PATCH,
    contradictions=(),
    extra_kwargs=({}, {"max_patches": 3}, {"crop_to_patches": False}),
)
