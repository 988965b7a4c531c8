"""Tiny EXAONE 4.5s: images and videos of any grid, a decoder with windows and full layers."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Exaone4_5_Config, Exaone4_5_ForConditionalGeneration
from transformers.models.exaone4_5.processing_exaone4_5 import Exaone4_5_Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmjax.models.exaone4_5 import model as ours
from mmjax.parity.arrays import Sample
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import Family, call_processor, hf_of, written
from tests.families.published import MODULE, Published
from tests.families.qwen2_vl import (
    GRID_FIELDS,
    GRIDS,
    IMAGE_TOKEN,
    SMALLER,
    VIDEO_SIZE,
    VIDEO_TOKEN,
    VISION,
    draw_grid,
    load_hf_videos,
)
from tests.families.qwen2_vl import torch_inputs as grid_inputs
from tests.families.sizes import DECODER, NO_KEYS, Keys, fit_text, resize_text
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant
from tests.oracle import fill_with_unit_norms

TEXT: dict[str, Any] = {
    **DECODER,
    "model_type": "exaone4_5_text",
    "head_dim": 8,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}
TOWER: dict[str, Any] = {
    **{key: value for key, value in VISION["qwen2_5_vl"].items() if key != "tokens_per_second"},
    "num_heads": 4,
    "hidden_size": 32,
    "num_key_value_heads": 2,
}


def tiny_config(
    *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = False, **ids: Any
) -> Any:
    """Return HF's config."""
    ids = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, **ids}
    return Exaone4_5_Config(
        text_config={**TEXT, **text},
        vision_config={**TOWER, **vision},
        tie_word_embeddings=is_tied,
        **ids,
        architectures=["Exaone4_5_ForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image or video."""
    grid, _ = GRIDS[media.modality][media.seed % 3]
    return draw_grid(config, media.modality, media.seed, grid, 0.0)


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it, which says no kinds of tokens."""
    inputs = grid_inputs(reference, sample)
    del inputs["mm_token_type_ids"]
    return inputs


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    return {**resize_text(width, head_dim, num_heads), "vision": {"out_hidden_size": width}}


fill = partial(fill_with_unit_norms, sharpness=1.4)
TINY = TinyFamily(
    name="exaone4_5",
    model_class=ours.Exaone4_5_ForConditionalGeneration,
    reference_class=Exaone4_5_ForConditionalGeneration,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 90),
    published_head_dim=128,
    max_embeds={"image": 15, "video": 18},
    fill=fill,
    variants={
        "plain": Variant({}, 8),
        "all else": Variant(
            {
                "is_tied": True,
                "text": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
                "vision": {
                    "window_size": 24,
                    "fullatt_block_indexes": [0, 2],
                    "num_key_value_heads": 1,
                    "hidden_act": "gelu",
                },
            },
            8,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


IMAGE, VIDEO = (f"<vision><|{one}_pad|></vision>" for one in ("image", "video"))


def write_files(path: Path) -> Path:
    tokens = ["<|image_pad|>", "<|video_pad|>", "<vision>", "</vision>", "<|endofturn|>"]
    tokenizer = make_tokenizer(tokens)
    ids = {f"{one}_token_id": f"<|{one}_pad|>" for one in ("image", "video")}
    config = tiny_config(
        text=fit_text(tokenizer, head_dim=16),
        vision={"patch_size": 14, "depth": 2, "window_size": 56},
        **{key: tokenizer.convert_tokens_to_ids(token) for key, token in ids.items()},
    )
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 14,
            "size": {"shortest_edge": 3136, "longest_edge": 50_176},
        },
        video_preprocessor_config={
            "video_processor_type": "Qwen2VLVideoProcessor",
            "size": VIDEO_SIZE,
        },
    )


path = made_once(write_files)
hf_processor = hf_of(Exaone4_5_Processor, Qwen2VLImageProcessorPil, path, has_videos=True)
EXAONE4_5 = Family(
    **written(TINY, write_files),
    needless_files=frozenset({"tokenizer_config.json", "video_preprocessor_config.json"}),
    published=Published(layouts={"module": MODULE}, unread=("mtp.layers.0.mlp.up_proj.weight",)),
    rendered=(
        f"<|user|>\n{IMAGE}what is it<|endofturn|>\n<|assistant|>\na car<|endofturn|>\n"
        "<|user|>\nwhich color<|endofturn|>\n<|assistant|>\n"
    ),
    with_system=("<|user|>\n", "<|system|>\nbe short<|endofturn|>\n<|user|>\n"),
    probed=("visual.blocks.1", "visual.merger"),
    call_hf=partial(call_processor, hf_processor),
    placeholder=IMAGE,
    video=VIDEO,
    load_hf_videos=partial(load_hf_videos, hf_processor, path),
    video_kwargs=({}, {"max_pixels": 30_000}),
    **GRID_FIELDS | {"extra_kwargs": ({}, {"images_kwargs": SMALLER})},
)
