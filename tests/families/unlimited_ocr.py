"""Tiny Unlimited-OCRs: a view and tiles line by line, and a decoder whose windows keep the prompt.

The first DeepSeek-OCR is the same without windows, and with other prompts.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import UnlimitedOcrConfig, UnlimitedOcrForConditionalGeneration
from transformers.models.unlimited_ocr.processing_unlimited_ocr import UnlimitedOcrProcessor

from mmjax.models.deepseek_ocr2 import model as ours
from mmjax.models.deepseek_ocr2.host_inputs import UnlimitedOcrHostInputs
from mmjax.rounding import round_up
from tests.families.deepseek_ocr2 import TEXT, DeepseekOcr2Family, torch_inputs
from tests.families.directories import make_tokenizer, write_directory
from tests.families.family import Family, written
from tests.families.published import MODULE, Published
from tests.families.sizes import NO_KEYS, TOWER, Keys
from tests.families.tiny import AFFINE, DrawnItem, Media, Variant, draw_bytes
from tests.families.without_torchvision import take_image_processor
from tests.oracle import fill_with_unit_norms

IMAGE_TOKEN = 95
VIEW, TILE, PATCH = 128, 80, 4
"""Pixels along a side: of a view 8 x 8 states, of a tile 5 x 5."""
GRIDS = ((1, 1), (2, 1), (1, 2))
"""Columns and rows of tiles, by turns; of the first there are none."""
WINDOW = 5
SAM: dict[str, Any] = {
    "hidden_size": 16,
    "mlp_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": VIEW,
    "patch_size": PATCH,
    "global_attn_indexes": [1],
    "output_channels": 12,
    "downsample_channels": [20, 24],
}
CLIP: dict[str, Any] = {**TOWER, "image_size": 18, "patch_size": 3}
"""Positions of 6 x 6 patches, fewer than a view has and more than a tile."""


def tiny_config(
    *, text: Keys = NO_KEYS, sam: Keys = NO_KEYS, encoder: Keys = NO_KEYS
) -> UnlimitedOcrConfig:
    """Return HF's config."""
    return UnlimitedOcrConfig(
        text_config={**TEXT, "num_key_value_heads": 4, "sliding_window": WINDOW, **text},
        vision_config={"sam_config": {**SAM, **sam}, "encoder_config": {**CLIP, **encoder}},
        image_token_id=IMAGE_TOKEN,
        architectures=["UnlimitedOcrForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    columns, rows = GRIDS[media.seed % len(GRIDS)]
    num_tiles = columns * rows if columns * rows > 1 else 0
    tensors = {
        "pixel_values": draw_bytes(media.seed, (3, VIEW, VIEW)),
        "pixel_values_local": draw_bytes((media.seed, 1), (num_tiles, 3, TILE, TILE)),
        "num_local_patches": np.array(num_tiles),
        "patches_grid": np.array([columns, rows]),
        "image_affine": AFFINE,
    }
    grid = (columns, rows) if num_tiles else (0, 0)
    num_tokens = UnlimitedOcrHostInputs(config).count_tokens(*grid)
    return DrawnItem(tensors, [config.image_token_id] * num_tokens)


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    return {"text": {"hidden_size": width, **heads}}


fill = partial(fill_with_unit_norms, sharpness=1.4)
TINY = DeepseekOcr2Family(
    name="unlimited_ocr",
    model_class=ours.UnlimitedOcrForConditionalGeneration,
    reference_class=UnlimitedOcrForConditionalGeneration,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 90),
    published_head_dim=128,
    max_embeds={"image": 73 + 60},
    max_model_len=448,
    fill=fill,
    variants={
        "plain": Variant({}, 10, ("two images",)),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


IMAGE = "<image>"
FEWER: dict[str, Any] = {"min_patches": 1, "max_patches": 1}
MARKS = ["<|grounding|>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<PAGE>"]


def write_files(path: Path, *, make_config: Any = tiny_config) -> Path:
    tokenizer = make_tokenizer([IMAGE, *MARKS], bos="<bos>")
    config = make_config(text={"vocab_size": round_up(len(tokenizer), 64)})
    config.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "UnlimitedOcrImageProcessor",
            "size": {"height": VIEW, "width": VIEW},
            "tile_size": TILE,
            "maximum_pad_value": TILE,
            "max_patches": 9,
        },
        processor_config={
            "patch_size": PATCH,
            "downsample_ratio": 4,
            "processor_class": "UnlimitedOcrProcessor",
        },
    )


class PillowOcr(take_image_processor("unlimited_ocr", "UnlimitedOcrImageProcessor")):
    """HF's class without torchvision: views and tiles of all images, whose sizes differ."""

    def pad_to_square(self, images: Any, background_color: Any = 0) -> Any:
        """Pad as HF's does, whose function is torchvision's."""
        height, width = images.shape[-2:]
        side = max(height, width)
        top, left = (side - height) // 2, (side - width) // 2
        color = torch.tensor(background_color, dtype=images.dtype)[:, None, None]
        padded = color.expand(*images.shape[:-2], side, side).clone()
        padded[..., top : top + height, left : left + width] = images
        return padded


UNLIMITED_OCR = Family(
    **written(TINY, write_files, UnlimitedOcrProcessor, PillowOcr, patch_size=PATCH),
    needless_files=frozenset({"tokenizer_config.json", "processor_config.json"}),
    llm_settings={"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 768},
    probed=("vision_tower.sam_encoder.layers.1", "vision_tower.vision_encoder.encoder.layers.1"),
    rendered=f"{IMAGE}what is ita carwhich color",
    with_system=("", "be short"),
    placeholder=IMAGE,
    extra_kwargs=({}, FEWER, {"min_patches": 3, "max_patches": 4}, {"crop_to_patches": False}),
    operator_kwargs=({"max_patches": 5}, {"crop_to_patches": False}),
    lowering_kwargs=FEWER,
    tensors={"pixel_values": 1e-6, "num_local_patches": 0.0, "patches_grid": 0.0},
    published=Published(layouts={"module": MODULE}),
    words=(*Family.words, "<|grounding|>", "<|det|>a<|/det|>"),
    takes_size=lambda width, height: 256 * min(width, height) > max(width, height),  # 2 views
)


# ---- the first DeepSeek-OCR ---------------------------------------------------------------------


def seeing_config(*, text: Keys = NO_KEYS, **settings: Keys) -> UnlimitedOcrConfig:
    """Return HF's config of a decoder without windows, under the name of DeepSeek's class."""
    kinds = {"layer_types": ["full_attention"] * 2}
    config = tiny_config(text={**kinds, **text}, **settings)
    config.architectures = ["DeepseekOCRForCausalLM"]
    return config


DEEPSEEK_OCR = replace(
    UNLIMITED_OCR,
    **written(
        replace(
            TINY,
            name="deepseek_ocr",
            model_class=ours.DeepseekOCRForCausalLM,
            make_config=seeing_config,
            variants={
                "plain": Variant(
                    {
                        "text": {
                            "num_key_value_heads": 2,
                            # Heads turn whole, as in HF, whatever the last key says.
                            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                        },
                        "sam": {"qkv_bias": False},
                        "encoder": {"hidden_act": "gelu", "image_size": 24},
                    },
                    10,
                    ("two images",),
                )
            },
        ),
        partial(write_files, make_config=seeing_config),
        UnlimitedOcrProcessor,
        PillowOcr,
        patch_size=PATCH,
    ),
    rendered=f"{IMAGE}\nwhat is ita carwhich color",
)
