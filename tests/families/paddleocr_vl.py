"""Tiny PaddleOCR-VLs: pictures of any grid, learned positions resampled to each."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

from mmjax.models.paddleocr_vl import model as ours
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.families.directories import made_once, make_tokenizer, with_weights, write_directory
from tests.families.family import Family, call_processor, hf_of
from tests.families.published import MODULE, Published
from tests.families.qwen2_vl import GRIDS, OTHER_SECTIONS, TEXT, turn
from tests.families.sizes import NO_KEYS, TOWER, Keys, fit_text, resize_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes, joined
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
    config = PaddleOCRVLConfig(
        text_config={**TEXT, "head_dim": 8, **tied, **text},
        vision_config={**VISION, **vision},
        image_token_id=IMAGE_TOKEN,
        video_token_id=94,
        vision_start_token_id=93,
        vision_end_token_id=92,
        **tied,
    )
    config.architectures = ["PaddleOCRVLForConditionalGeneration"]
    return config


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    grid, _ = GRIDS["image"][media.seed % 3]
    size, channels = config.vision_config.patch_size, config.vision_config.num_channels
    shape = (int(np.prod(grid)), channels, size, size)
    tensors = {
        "pixel_values": draw_bytes(media.seed, shape),
        "image_affine": AFFINE,
        "image_grid_thw": np.array(grid, np.int64),
    }
    ids = [IMAGE_TOKEN] * (int(np.prod(grid)) // 4)
    return DrawnItem(tensors, ids, before=[93], after=[92])


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it."""
    data = joined(sample)
    if data:
        data["image_grid_thw"] = data["image_grid_thw"].reshape(-1, 3)
    inputs = make_reference_inputs(sample.token_ids, data)
    return inputs | {"mm_token_type_ids": (inputs["input_ids"] == IMAGE_TOKEN).int()}


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
SMALLER = {"size": {"shortest_edge": 3136, "longest_edge": 20_000}}


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


path = made_once(write_files)


hf_processor = hf_of(PaddleOCRVLProcessor, PaddleOCRVLImageProcessorPil, path)


def make_published_config(**settings: Any) -> Any:
    """Return HF's config of the published one, whose head is its own: the files have it."""
    config = PaddleOCRVLConfig(**settings)
    config.tie_word_embeddings = False
    return config


PADDLEOCR_VL = Family(
    name="paddleocr_vl",
    architecture="PaddleOCRVLForConditionalGeneration",
    tiny=TINY,
    is_written=True,
    path=path,
    write=with_weights(write_files, fill),
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
    takes_embeds=False,  # grids beside them
    rendered=f"User: {IMAGE}what is it\nAssistant: a car</s>User: which color\nAssistant: ",
    with_system=("User: <", "be short\nUser: <"),
    probed=("visual.blocks.1", "visual.post_layernorm", "visual.merger"),
    call_hf=partial(call_processor, hf_processor),
    placeholder=IMAGE,
    has_pixel_counts=True,
    extra_kwargs=({}, SMALLER),
    operator_kwargs=(SMALLER, {"max_pixels": 30_000}),
    lowering_kwargs={"max_pixels": 30_000},
    tensors={"pixel_values": 1e-6, "image_grid_thw": 0.0},
    takes_size=lambda width, height: max(width, height) <= 200 * min(width, height),
)
