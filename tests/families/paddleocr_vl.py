"""Tiny PaddleOCR-VLs: pictures of any grid, learned positions resampled to each."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

from mmjax.models.paddleocr_vl import model as ours
from tests.families.directories import make_tokenizer, write_directory
from tests.families.family import Family, written
from tests.families.published import MODULE, Published
from tests.families.qwen2_vl import (
    GRID_FIELDS,
    GRIDS,
    OTHER_SECTIONS,
    TEXT,
    draw_tensors,
    torch_inputs,
    turn,
)
from tests.families.sizes import NO_KEYS, TOWER, Keys, fit_text, resize_text
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant
from tests.oracle import fill_with_unit_norms

IMAGE_TOKEN = 95
VISION: dict[str, Any] = {
    **TOWER,
    "image_size": 20,
    "patch_size": 4,
}


def tiny_config(*, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = False) -> Any:
    """Return HF's config, with 25 learned positions."""
    tied: dict[str, Any] = {"tie_word_embeddings": is_tied}
    return PaddleOCRVLConfig(
        text_config={**TEXT, "head_dim": 8, **tied, **text},
        vision_config={**VISION, **vision},
        image_token_id=IMAGE_TOKEN,
        video_token_id=94,
        vision_start_token_id=93,
        vision_end_token_id=92,
        **tied,
        architectures=["PaddleOCRVLForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    grid, _ = GRIDS["image"][media.seed % 3]
    size, channels = config.vision_config.patch_size, config.vision_config.num_channels
    tensors = draw_tensors("image", media.seed, grid, (channels, size, size))
    ids = [IMAGE_TOKEN] * (int(np.prod(grid)) // 4)
    return DrawnItem(tensors, ids, before=[93], after=[92])


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    rope = turn(TEXT["rope_parameters"], head_dim)
    return resize_text(width, head_dim, num_heads, rope_parameters=rope)


fill = partial(fill_with_unit_norms, sharpness=1.4)
TINY = TinyFamily(
    name="paddleocr_vl",
    model_class=ours.PaddleOCRVLForConditionalGeneration,
    reference_class=PaddleOCRVLForConditionalGeneration,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 90),
    published_head_dim=128,
    max_embeds={"image": 15},
    fill=fill,
    variants={
        "plain": Variant({}, 8),
        "all else": Variant(
            {
                "is_tied": True,
                "text": {
                    "use_bias": True,
                    "head_dim": 16,
                    "rope_parameters": {**OTHER_SECTIONS, "mrope_section": [4, 2, 2]},
                },
                "vision": {
                    "hidden_act": "gelu",
                    "image_size": 12,
                    "layer_norm_eps": 1e-5,
                    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
                },
            },
            8,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


TOKEN = "<|IMAGE_PLACEHOLDER|>"
IMAGE = f"<|IMAGE_START|>{TOKEN}<|IMAGE_END|>"


def write_files(path: Path) -> Path:
    tokens = [TOKEN, "<|IMAGE_START|>", "<|IMAGE_END|>"]
    tokenizer = make_tokenizer(tokens, bos="<|begin_of_sentence|>", named={"image_token": TOKEN})
    sections = {**TEXT["rope_parameters"], "mrope_section": [2, 3, 3]}
    config = tiny_config(
        text=fit_text(tokenizer, head_dim=16, rope_parameters=sections),
        vision={"image_size": 70, "patch_size": 14},
    )
    config.image_token_id = tokenizer.convert_tokens_to_ids(TOKEN)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "min_pixels": 3136,
            "max_pixels": 160_000,
        },
    )


def make_published_config(**settings: Any) -> Any:
    """Return HF's config of the published one, whose head is its own: the files have it."""
    config = PaddleOCRVLConfig(**settings)
    config.tie_word_embeddings = False
    return config


PADDLEOCR_VL = Family(
    **written(TINY, write_files, PaddleOCRVLProcessor, PaddleOCRVLImageProcessorPil),
    needless_files=frozenset({"tokenizer_config.json"}),
    published=Published(
        make_config=make_published_config,
        layouts={
            "hub": {
                "model.projector.": "mlp_AR.",
                "model.visual.": "visual.",
                "model.language_model.": "model.",
            },
            "module": MODULE,
        },
        unread=(
            "visual.vision_model.embeddings.packing_position_embedding.weight",
            "visual.vision_model.head.probe",
        ),
    ),
    rendered=f"User: {IMAGE}what is it\nAssistant: a car</s>User: which color\nAssistant: ",
    with_system=("User: <", "be short\nUser: <"),
    probed=("visual.blocks.1", "visual.post_layernorm", "visual.merger"),
    placeholder=IMAGE,
    **GRID_FIELDS,
)
