"""Tiny DeepSeek-OCR 2s: a view of the whole and tiles, each of as many patches as published."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DeepseekOcr2Config, DeepseekOcr2ForConditionalGeneration
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
)
from transformers.models.deepseek_ocr2.processing_deepseek_ocr2 import DeepseekOcr2Processor

from mmjax.models.deepseek_ocr2 import model as ours
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from mmjax.rounding import round_up
from tests.families.directories import make_tokenizer, write_directory
from tests.families.family import Family, written
from tests.families.published import MODULE, Published
from tests.families.sizes import NO_KEYS, TOWER, Keys
from tests.families.tiny import (
    AFFINE,
    DrawnItem,
    Media,
    Parts,
    TinyFamily,
    Variant,
    draw_bytes,
    joined,
)
from tests.oracle import fill_with_unit_norms

IMAGE_TOKEN = 95
VIEW_TOKENS, TILE_TOKENS = 256, 144
PATCH = 2
VIEW, TILE = 64 * PATCH, 48 * PATCH
"""Pixels along a side: the queries, whose numbers HF has in its code, ask for as many patches."""
NUM_TILES = (0, 2, 1)
"""By turns."""
TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse"],
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
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
SMALL_SAM: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 1}
"""Of what engines serve: scores of 4,096 patches take most of the time."""
ENCODER: dict[str, Any] = {
    **TOWER,
    "vocab_size": 1,
    "intermediate_size": 32,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def tiny_config(
    *, text: Keys = NO_KEYS, sam: Keys = NO_KEYS, encoder: Keys = NO_KEYS
) -> DeepseekOcr2Config:
    """Return HF's config, with patches of two pixels a side."""
    return DeepseekOcr2Config(
        text_config={**TEXT, **text},
        vision_config={
            "sam_config": {**SAM, **sam},
            "encoder_config": {**ENCODER, **encoder},
        },
        image_token_id=IMAGE_TOKEN,
        architectures=["DeepseekOcr2ForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    num_tiles = NUM_TILES[media.seed % len(NUM_TILES)]
    tensors = {
        "pixel_values": draw_bytes(media.seed, (3, VIEW, VIEW)),
        "pixel_values_local": draw_bytes((media.seed, 1), (num_tiles, 3, TILE, TILE)),
        "num_local_patches": np.array(num_tiles),
        "image_affine": AFFINE,
    }
    num_tokens = VIEW_TOKENS + num_tiles * TILE_TOKENS + 1
    return DrawnItem(tensors, [config.image_token_id] * num_tokens)


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it: views, tiles if there are any."""
    joined_already = ("pixel_values_local", "image_affine")
    stacked = Sample(
        token_ids=sample.token_ids,
        items=[
            item._replace(
                tensors={
                    name: value if name in joined_already else value[None]
                    for name, value in item.tensors.items()
                }
            )
            for item in sample.items
        ],
    )
    data: dict[str, Any] = joined(stacked)
    if not len(data.get("pixel_values_local", ())):
        data.pop("pixel_values_local", None)
    if "num_local_patches" in data:
        data["num_local_patches"] = tuple(data["num_local_patches"].tolist())
    return make_reference_inputs(sample.token_ids, data)


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    return {"text": {"hidden_size": width, "num_attention_heads": num_heads}}


class DeepseekOcr2Family(TinyFamily):
    """Prompts about images are much longer than the answers of tests."""

    @property
    def workload(self) -> list[Parts]:
        """The usual prompts, the longest first, and text alone behind it.

        A prompt starts where all of it has room: of two about images that fit beside each other,
        one is answered before the other is computed. Text fits into what the longest leaves of a
        small cache, and its blocks are then taken from it.
        """
        first, text, longest, *others = super().workload
        return [longest, text, first, *others]


fill = partial(fill_with_unit_norms, sharpness=1.4)
TINY = DeepseekOcr2Family(
    name="deepseek_ocr2",
    model_class=ours.DeepseekOcr2ForConditionalGeneration,
    reference_class=DeepseekOcr2ForConditionalGeneration,
    make_config=tiny_config,
    resize=resize,
    served={"sam": SMALL_SAM},
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 90),
    published_head_dim=128,
    max_embeds={"image": 257 + 144 * 2},
    max_model_len=1792,
    fill=fill,
    variants={
        # Three images are 1,300 tokens, and a program of their own.
        "plain": Variant({}, 10, ("text", "image", "two images")),
        "groups of experts": Variant(
            {
                "text": {
                    "topk_method": "group_limited_greedy",
                    "n_group": 2,
                    "topk_group": 1,
                    "routed_scaling_factor": 1.5,
                    "num_key_value_heads": 2,
                },
                "sam": {"qkv_bias": False},
            },
            10,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


IMAGE = "<image>"
FEWER: dict[str, Any] = {"min_patches": 1, "max_patches": 1}


def write_files(path: Path) -> Path:
    tokenizer = make_tokenizer(
        [IMAGE, "<|grounding|>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>"], bos="<bos>"
    )
    config = tiny_config(text={"vocab_size": round_up(len(tokenizer), 64)}, sam=SMALL_SAM)
    config.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "DeepseekOcr2ImageProcessor",
            "size": {"height": VIEW, "width": VIEW},
            "tile_size": TILE,
        },
        processor_config={
            "patch_size": PATCH,
            "downsample_ratio": 4,
            "processor_class": "DeepseekOcr2Processor",
        },
    )


DEEPSEEK_OCR2 = Family(
    **written(
        TINY, write_files, DeepseekOcr2Processor, DeepseekOcr2ImageProcessorPil, patch_size=PATCH
    ),
    needless_files=frozenset({"tokenizer_config.json", "processor_config.json"}),
    llm_settings={"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 1536},
    probed=("vision_tower.sam_encoder.layers.1", "vision_tower.vision_encoder.norm"),
    rendered=f"{IMAGE}\nwhat is ita carwhich color",
    with_system=("", "be short"),
    placeholder=IMAGE,
    extra_kwargs=({}, FEWER, {"min_patches": 3, "max_patches": 4}),
    operator_kwargs=({"max_patches": 5},),
    lowering_kwargs=FEWER,
    tensors={"pixel_values": 1e-6, "num_local_patches": 0.0},
    published=Published(layouts={"module": MODULE}),
    words=(*Family.words, "<|grounding|>", "<|ref|>a<|/ref|>"),
)
