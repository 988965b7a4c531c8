"""Tiny Ovis2s: pictures of one to six tiles, marks among them, before Qwen2's decoder."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Ovis2Config, Ovis2ForConditionalGeneration
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.ovis2.processing_ovis2 import Ovis2Processor

from mmjax.models.ovis2 import model as ours
from mmjax.models.ovis2.host_inputs import MARKS, arrange
from tests.families.directories import make_tokenizer, write_directory
from tests.families.family import CHATML, Family, written
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
from tests.oracle import fill_with_unit_norms

ATOM_ID, *MARK_IDS = range(122, 128)
TEXT: dict[str, Any] = {
    **DECODER,
    "model_type": "qwen2",
}
VISION: dict[str, Any] = {
    **TOWER,
    "image_size": 32,
    "patch_size": 8,
    "hidden_stride": 2,
    "vocab_size": 77,
}
GRIDS = ((1, 2), (1, 1), (2, 1))
"""By turns."""


def tiny_config(*, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, **settings: Any) -> Ovis2Config:
    """Return HF's config: tiles of 4 x 4 patches, 4 embeddings each."""
    decoder = {**TEXT, **text}
    return Ovis2Config(
        text_config=decoder,
        vision_config={**VISION, **vision},
        image_token_id=ATOM_ID,
        visual_indicator_token_ids=MARK_IDS,
        hidden_size=decoder["hidden_size"],
        vocab_size=decoder["vocab_size"],
        **settings,
        architectures=["Ovis2ForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    vision, grid = config.vision_config, GRIDS[media.seed % len(GRIDS)]
    per_tile = (vision.image_size // vision.patch_size // vision.hidden_stride) ** 2
    embed_rows = arrange(*grid, per_tile)
    num_tiles = (embed_rows >= 0).sum() // per_tile
    ids = [ATOM_ID if row >= 0 else MARK_IDS[-1 - row] for row in embed_rows]
    pixels = draw_bytes(media.seed, (num_tiles, 3, vision.image_size, vision.image_size))
    tensors = {"pixel_values": pixels, "image_affine": AFFINE, "image_grids": np.array(grid)}
    return DrawnItem(tensors, ids)


def fill(model: Any) -> None:
    """Make visual tokens likely or not: means of all of them would be faint, and much alike."""
    fill_with_unit_norms(model)
    for name, parameter in model.named_parameters():
        if name.endswith("head_norm.weight"):
            with torch.no_grad():
                parameter *= 4.0


TINY = TinyFamily(
    name="ovis2",
    model_class=ours.Ovis2ForConditionalGeneration,
    reference_class=Ovis2ForConditionalGeneration,
    make_config=tiny_config,
    draw_item=draw_item,
    torch_inputs=partial(joined_inputs, left_out=("image_grids",)),
    word_ids=range(1, ATOM_ID),
    published_head_dim=64,
    max_embeds={"image": 16},
    fill=fill,
    variants={
        "plain": Variant({}, 9),
        "a head of its own, biases, single patches": Variant(
            {
                "vision": {"qkv_bias": True, "mlp_bias": True, "hidden_stride": 1},
                "tie_word_embeddings": False,
            },
            9,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


IMAGE = "<image>"
SIDE = 56


def write_files(path: Path) -> Path:
    tokenizer = make_tokenizer(
        ["<|im_start|>", "<IMG_ATOM>", *MARKS], eos="<|im_end|>", pad="<|endoftext|>"
    )
    config = tiny_config(
        text=fit_text(tokenizer, hidden_size=64),
        vision={"image_size": SIDE, "patch_size": 14},
    )
    config.image_token_id, *marks = map(tokenizer.convert_tokens_to_ids, ("<IMG_ATOM>", *MARKS))
    config.visual_indicator_token_ids = marks
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "Ovis2ImageProcessor",
            "crop_to_patches": True,
            "size": {"height": SIDE, "width": SIDE},
        },
        processor_config={"image_seq_length": 4, "processor_class": "Ovis2Processor"},
    )


OVIS2 = Family(
    **written(TINY, write_files, Ovis2Processor, Ovis2ImageProcessorPil, image_seq_length=4),
    needless_files=frozenset({"tokenizer_config.json"}),
    rendered="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    + CHATML.format(image=f"{IMAGE}\n"),
    with_system=("You are a helpful assistant.", "be short"),
    probed=("vision_tower.encoder.layers.1", "multi_modal_projector"),
    embed_token_ids=lambda processor: processor.info.get_embed_token_ids("image"),
    placeholder=IMAGE,
    takes_embeds=False,
    lowering_kwargs={"max_patches": 2},
    extra_kwargs=(
        {},
        {"max_patches": 3},
        {"use_covering_area_grid": False},
        {"crop_to_patches": False},
    ),
    operator_kwargs=({"max_patches": 23}, {"crop_to_patches": False}),
    contradictions=(
        ("processor_config", {"image_seq_length": 9}, "`image_seq_length` .* is 9, .* has 4"),
        ("processor_config", {"image_seq_length": None}, "`image_seq_length` .* is 256, "),
        ("preprocessor_config", {"size": {"height": 28, "width": 28}}, "`size` .*28.*, but"),
        ("config", {"image_token_id": 7}, "but `image_token_id` of config.json is 7"),
        ("config", {"visual_indicator_token_ids": [1, 2, 3, 4, 5]}, r"is \[1, 2, 3, 4, 5\]"),
    ),
)
