"""Tiny LFM2-VLs: tiles and whole pictures of any size, layers of convolutions and of attention."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from mmjax.layers.recurrent.chunks import CHUNK
from mmjax.models.lfm2_vl import model as ours
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import CHATML, Family, HFInputs, hf_of, written
from tests.families.sizes import DECODER, NO_KEYS, TOWER, Keys, fit_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes
from tests.families.without_torchvision import take_image_processor
from tests.oracle import fill_with_unit_norms

IMAGE_TOKEN, START, END = 95, 94, 93
TEXT: dict[str, Any] = {
    **DECODER,
    "vocab_size": 96,
    "intermediate_size": 72,
    "block_multiple_of": 16,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
VISION: dict[str, Any] = {
    **TOWER,
    "model_type": "siglip2_vision_model",
    "num_patches": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
SHAPES = (((2, 6),), ((4, 4), (4, 4), (6, 2)), ((10, 2),))
"""Rows and columns of patches of each tile and of the whole, by turns.

NOTE: torch's `interpolate` gives HF's tower other learned positions where there is one column.
"""


def tiny_config(
    *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = True, **settings: Any
) -> Lfm2VlConfig:
    """Return HF's config."""
    settings = {"projector_hidden_size": 40, **settings}
    return Lfm2VlConfig(
        text_config={"model_type": "lfm2", **TEXT, **text},
        vision_config={**VISION, **vision},
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=is_tied,
        **settings,
        architectures=["Lfm2VlForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    shapes = np.array(SHAPES[media.seed % len(SHAPES)])
    size, counts = config.vision_config.patch_size, shapes.prod(-1)
    ids: list[int] = [START]
    for count in counts:
        ids += [IMAGE_TOKEN] * int(count // config.downsample_factor**2)
    return DrawnItem(
        {
            "pixel_values": draw_bytes(media.seed, (int(counts.sum()), size, size, 3)),
            "spatial_shapes": shapes,
            "image_affine": AFFINE,
        },
        [*ids, END],
        np.equal([*ids, END], IMAGE_TOKEN),
    )


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it: units that are padded to each other."""
    data: dict[str, Any] = {}
    if sample.items:
        pixels = [make_pixels(item.tensors, colours_last=True) for item in sample.items]
        shapes = np.concatenate([item["spatial_shapes"] for item in pixels])
        counts = shapes.prod(-1)
        patches = np.concatenate([item["pixel_values"] for item in pixels])
        data = {
            "pixel_values": np.split(patches.reshape(len(patches), -1), np.cumsum(counts)[:-1]),
            "pixel_attention_mask": [np.ones(count, np.int32) for count in counts],
            "spatial_shapes": shapes,
        }
    return make_reference_inputs(sample.token_ids, data)


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    assert width == head_dim * num_heads, "no key of the config says how wide a head is"
    text = {
        "hidden_size": width,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // 4),
    }
    return {"text": text}


fill = partial(fill_with_unit_norms, sharpness=1.4)
TINY = TinyFamily(
    name="lfm2_vl",
    model_class=ours.Lfm2VlForConditionalGeneration,
    reference_class=Lfm2VlForConditionalGeneration,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 90),
    published_head_dim=64,
    max_embeds={"image": 11},
    longest_run=CHUNK,
    fill=fill,
    variants={
        "plain": Variant({}, 10),
        "biases, a head of its own, four taps": Variant(
            {
                "text": {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
                "is_tied": False,
            },
            10,
        ),
        "squares of one, no norm, no bias, fewer positions": Variant(
            {
                "downsample_factor": 1,
                "projector_use_layernorm": False,
                "projector_bias": False,
                "vision": {"num_patches": 4},
            },
            10,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


IMAGE = "<image>"
SETTINGS: dict[str, Any] = {
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "do_image_splitting": True,
    "downsample_factor": 2,
    "encoder_patch_size": 8,
    "max_image_tokens": 12,
    "min_image_tokens": 4,
    "max_pixels_tolerance": 2.0,
    "max_tiles": 6,
    "min_tiles": 2,
    "tile_size": 48,
    "use_thumbnail": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""As preprocessor_config.json of the published repositories, but for the sizes."""
WHOLE: dict[str, Any] = {"do_image_splitting": False}
FEWER: dict[str, Any] = {"max_tiles": 4, "max_image_tokens": 6, "use_thumbnail": False}


def write_files(path: Path, *, adds_bos: bool = False) -> Path:
    """Write a checkpoint's files; `adds_bos`: whether its tokenizer begins each text with BOS."""
    bos = "<|startoftext|>"
    named = {
        "image_token": IMAGE,
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail_token": "<|img_thumbnail|>",
    }
    tiles = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = make_tokenizer(
        [*[bos] * (not adds_bos), "<|im_start|>", *named.values(), *tiles],
        bos=bos if adds_bos else None,
        eos="<|im_end|>",
        named=named,
    )
    tokenizer.bos_token = bos
    config = tiny_config(
        text=fit_text(tokenizer, hidden_size=64),
        vision={"patch_size": 8},
    )
    config.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config=SETTINGS,
        processor_config={"processor_class": "Lfm2VlProcessor"},
    )


path = made_once(write_files)


hf_processor = hf_of(Lfm2VlProcessor, take_image_processor("lfm2_vl", "Lfm2VlImageProcessor"), path)
"""With Pillow's resizing in place of torchvision's."""


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Call HF's processor."""
    outputs = hf_processor()(
        text=[prompt], images=images or None, return_tensors="pt", **(kwargs if images else {})
    )
    tensors = {name: value.numpy() for name, value in outputs.items()}
    return HFInputs(tensors["input_ids"][0].tolist(), tensors)


LFM2_VL = Family(
    **written(TINY, write_files),
    needless_files=frozenset({"tokenizer_config.json", "processor_config.json"}),
    rendered="<|startoftext|>" + CHATML.format(image=IMAGE),
    with_system=(
        "<|startoftext|>",
        "<|startoftext|><|im_start|>system\nbe short<|im_end|>\n",
    ),
    probed=("vision_tower.blocks.1", "multi_modal_projector"),
    call_hf=call_hf,
    placeholder=IMAGE,
    takes_embeds=False,
    extra_kwargs=({}, WHOLE, FEWER),
    operator_kwargs=(FEWER, WHOLE),
    lowering_kwargs=WHOLE,
    tensors={"pixel_values": 1e-6, "spatial_shapes": 0.0, "pixel_attention_mask": 0.0},
    colours_last=True,
    takes_size=lambda width, height: max(width, height) < 6 * min(width, height),
)
