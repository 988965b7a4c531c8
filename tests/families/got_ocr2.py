"""Tiny GOT-OCR 2s: SAM's states of pages and of their tiles, compressed twice."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import GotOcr2Config, GotOcr2ForConditionalGeneration
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.got_ocr2.processing_got_ocr2 import GotOcr2Processor

from mmjax.models.got_ocr2 import model as ours
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.family import Family, HFInputs, call_processor, hf_of, written
from tests.families.published import LLM_FIRST, MODULE, Published
from tests.families.sizes import DECODER, NO_KEYS, Keys, fit_text, resize_text
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

IMAGE_TOKEN = 127
NUM_TILES = (1, 3, 2)
"""By turns."""
SAM: dict[str, Any] = {
    "hidden_size": 24,
    "mlp_dim": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "window_size": 3,
    "global_attn_indexes": [1],
    "output_channels": 12,
}
"""Eight rows and columns of patches, in windows of which the last are not filled."""


def tiny_config(
    *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = True, image_id: int = 127
) -> Any:
    """Return HF's config; a tile has four embeddings."""
    return GotOcr2Config(
        text_config={"model_type": "qwen2", **DECODER, **text},
        vision_config={**SAM, **vision},
        image_token_index=image_id,
        tie_word_embeddings=is_tied,
        architectures=["GotOcr2ForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    tiles = NUM_TILES[media.seed % len(NUM_TILES)]
    vision = config.vision_config
    pixels = draw_bytes(media.seed, (tiles, vision.num_channels, *[vision.image_size] * 2))
    side = -(-(vision.image_size // vision.patch_size) // 4)
    tensors = {"pixel_values": pixels, "image_affine": AFFINE}
    return DrawnItem(tensors, [config.image_token_index] * tiles * side**2)


fill = partial(fill_with_unit_norms, sharpness=1.4)
TINY = TinyFamily(
    name="got_ocr2",
    model_class=ours.GotOcr2ForConditionalGeneration,
    reference_class=GotOcr2ForConditionalGeneration,
    make_config=tiny_config,
    resize=partial(resize_text, model_type="qwen3"),
    draw_item=draw_item,
    torch_inputs=joined_inputs,
    word_ids=range(1, IMAGE_TOKEN),
    published_head_dim=64,
    max_embeds={"image": 12},
    fill=fill,
    variants={
        "plain": Variant({}, 7),
        "a head of its own, no biases, odd numbers of patches": Variant(
            {
                "is_tied": False,
                "vision": {
                    "qkv_bias": False,
                    "image_size": 36,
                    "window_size": 5,
                    "global_attn_indexes": [0],
                    "layer_norm_eps": 1e-3,
                    "hidden_act": "relu",
                },
            },
            7,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


SIDE, PAD = 56, "<imgpad>"
SYSTEM = "You should follow the instructions carefully and explain your answers in detail."


class TinyProcessor(GotOcr2Processor):
    """HF's, of tiles with as many embeddings as the tiny ones have."""

    num_image_tokens = 4


def write_files(path: Path) -> Path:
    tokens = [PAD, "<img>", "</img>", "<|im_start|>", "<|im_end|>"]
    tokenizer = make_tokenizer(tokens, eos="<|endoftext|>")
    config = tiny_config(
        text=fit_text(tokenizer, hidden_size=64),
        vision={"image_size": SIDE, "patch_size": 7},
        image_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
        },
    )


path = made_once(write_files)
hf_processor = hf_of(TinyProcessor, GotOcr2ImageProcessorPil, path)


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Call HF's processor, or, about no image, its tokenizer."""
    if images:
        return call_processor(hf_processor, prompt, images, kwargs)
    return HFInputs(hf_processor().tokenizer(prompt)["input_ids"], {})


TILES: dict[str, Any] = {"crop_to_patches": True}
GOT_OCR2 = Family(
    **written(TINY, write_files),
    needless_files=frozenset({"tokenizer_config.json"}),
    published=Published(layouts={"files": LLM_FIRST, "module": MODULE}),
    rendered=(
        f"<|im_start|>system\n{SYSTEM}<|im_end|><|im_start|>user\n<img>{PAD}</img>\nwhat is it"
        "<|im_end|><|im_start|>assistant\na car<|im_end|><|im_start|>user\nwhich color<|im_end|>"
        "<|im_start|>assistant\n"
    ),
    with_system=(SYSTEM, "be short"),
    question="OCR: ",
    probed=("vision_tower.layers.1", "multi_modal_projector"),
    call_hf=call_hf,
    placeholder=PAD,
    lowering_kwargs={"max_patches": 2},
    extra_kwargs=({}, TILES, {**TILES, "min_patches": 2, "max_patches": 3}),
    operator_kwargs=({**TILES, "max_patches": 11}, TILES),
)
