"""Tiny Chameleons: images are codes of a vocabulary, and codes are never sampled."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import ChameleonConfig
from transformers import ChameleonForConditionalGeneration as HFModel
from transformers.models.chameleon.image_processing_pil_chameleon import ChameleonImageProcessorPil
from transformers.models.chameleon.processing_chameleon import ChameleonProcessor

from mmjax.models.chameleon.model import ChameleonForConditionalGeneration
from tests.families.directories import edit_golden, golden_path, save_weights
from tests.families.family import Family, HFInputs, hf_of
from tests.families.published import Published
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes

VOCAB_SIZE, NUM_CODES, TOKENS_PER_IMAGE = 160, 40, 16
IMAGE, BEGIN, END = 2, 3, 4
FIRST_CODE = 100


def name_of_code(code: int) -> str:
    """Return a code's name in the vocabulary, as published."""
    letters = str(code).translate(str.maketrans("0123456789", "ABCDEFGHIJ"))
    return f"IMGIMG{letters}Z"


def vocabulary_map(num_codes: int = NUM_CODES, first: int = FIRST_CODE) -> dict[str, int]:
    """Return the map of tokens; codes' run backwards, so that a code is not its token's place."""
    codes = {name_of_code(code): first + num_codes - 1 - code for code in range(num_codes)}
    return {"<image>": IMAGE, "<racm3:break>": BEGIN, "<eoss>": END} | codes


def tiny_config(**changes: Any) -> Any:
    """Return a config of width 32, two layers of four heads; 8x8 pixels, 16 codes an image."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "vocabulary_map": vocabulary_map(),
        "vq_config": {
            "embed_dim": 8,
            "num_embeddings": NUM_CODES,
            "latent_channels": 8,
            "resolution": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
    }
    return ChameleonConfig(**{**settings, **changes})


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    vq = config.vq_config
    tokens = [BEGIN, *[IMAGE] * TOKENS_PER_IMAGE, END]
    shape = (vq.in_channels, vq.resolution, vq.resolution)
    tensors = {"pixel_values": draw_bytes(media.seed, shape), "image_affine": AFFINE}
    return DrawnItem(tensors, tokens, np.equal(tokens, IMAGE))


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    if num_heads * head_dim != width:
        raise ValueError(f"{num_heads} heads of {head_dim} are not {width}, as Chameleon's must be")
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    return {"hidden_size": width, **sizes}


ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
TINY = TinyFamily(
    name="chameleon",
    model_class=ChameleonForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    word_ids=range(5, FIRST_CODE),
    published_head_dim=128,
    max_embeds={"image": TOKENS_PER_IMAGE},
    variants={
        "plain": Variant({}, 5),
        "norms behind, shared key heads": Variant({"swin_norm": True, "num_key_value_heads": 2}, 5),
        "biases, tied, linear rope": Variant(
            {
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
                "rope_parameters": ROPE,
            },
            5,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


path = partial(golden_path, "chameleon")
hf_processor = hf_of(ChameleonProcessor, ChameleonImageProcessorPil, path, image_seq_length=256)


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Call HF's processor, whose kwargs are of text, too."""
    outputs = hf_processor()(text=prompt, images=images or None, return_tensors="np", **kwargs)
    return HFInputs(outputs["input_ids"][0].tolist(), outputs)


def write(folder: Path) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return save_weights(edit_golden("chameleon", folder, config=heads))


COMPLETION = {"return_for_text_completion": True}
CHAMELEON = Family(
    name="chameleon",
    architecture="ChameleonForConditionalGeneration",
    tiny=TINY,
    path=path,
    write=write,
    published=Published(
        make_config=partial(ChameleonConfig, vocabulary_map=vocabulary_map(8192, 4), vq_config={}),
        left_out=(),
        unread=("model.vqmodel.decoder.conv_in.weight",),
    ),
    rendered=("<image>\nwhat is it<reserved08706>a car<reserved08706>which color"),
    with_system=("<image>", "be short<reserved08706><image>"),
    takes_embeds=False,
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_embed_token_id("image")],
    placeholder="<image>",
    extra_kwargs=({}, COMPLETION),
    words=(*Family.words, *("<s>", "</s>", "<racm3:break>", "<eoss>")),
    contradictions=(
        (
            "processor_config",
            {"image_processor.crop_size": {"height": 30, "width": 30}},
            "makes 30x30 .* takes 64x64",
        ),
    ),
)
