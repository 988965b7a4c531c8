"""Tiny Gemma 3s: images of one crop and of several, attention in both directions inside them."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, Gemma3Config
from transformers import Gemma3ForConditionalGeneration as HFModel
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from mmjax.config.engine_config import ModelConfig, MultiModalConfig
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.models.registry import create_processor
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from mmjax.processing.processor import BaseMultiModalProcessor, ProcessorCache
from tests.families.directories import made_once
from tests.families.family import Family, call_processor, hf_of
from tests.families.published import THREE_LAYOUTS, Published
from tests.families.sizes import NO_KEYS, Keys, resize_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes, joined
from tests.kit import (
    fill_by_name,
    gemma_tokenizer,
    save_gemma3_processor,
    tiny_gemma3_checkpoint,
    tiny_gemma3_config,
)

SHORT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
NUM_CROPS = (1, 2, 1, 3)
"""By turns."""


def tiny_config(
    *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, tokens_per_image: int = 4, is_tied: bool = True
) -> Gemma3Config:
    """Return a config of width 32, two sliding layers and a global one."""
    config = tiny_gemma3_config(
        gemma_tokenizer(),
        text={**SHORT, **text},
        vision=vision,
        tokens_per_image=tokens_per_image,
    )
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = is_tied
    return config


def fill(model: Any) -> None:
    """Fill with random values; attention is sharp, and a tied head does not say its own token."""
    fill_by_name(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter += 1.0
            elif "embed_tokens" in name:
                parameter *= 0.3


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image: each crop's tokens stand between marks."""
    side, crops = config.vision_config.image_size, NUM_CROPS[media.seed % len(NUM_CROPS)]
    soft = config.image_token_index
    one = [config.boi_token_index, *[soft] * config.mm_tokens_per_image, config.eoi_token_index]
    ids = one * crops
    pixels = draw_bytes(media.seed, (crops, 3, side, side))
    return DrawnItem({"pixel_values": pixels, "image_affine": AFFINE}, ids, np.equal(ids, soft))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it."""
    kinds = torch.tensor(sample.is_embed, dtype=torch.long)[None]
    return make_reference_inputs(sample.token_ids, joined(sample)) | {"token_type_ids": kinds}


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    sizes = (width, head_dim, num_heads)
    return resize_text(*sizes, queries_per_key=2, query_pre_attn_scalar=head_dim)


TINY = TinyFamily(
    name="gemma3",
    model_class=Gemma3ForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    fill=fill,
    word_ids=range(5, 250),
    published_head_dim=256,
    max_embeds={"image": 12},
    variants={
        "plain": Variant({}, 10),
        "window inside an image": Variant(
            {"text": {"sliding_window": 3}, "tokens_per_image": 16}, 10
        ),
        "head of its own": Variant({"is_tied": False}, 10),
        "biases and linear rope": Variant(
            {"text": {"attention_bias": True, "rope_parameters": LINEAR}}, 10
        ),
        "patches that fill no pool": Variant({"vision": {"image_size": 75}}, 10),
        "wide heads": Variant(
            {"text": {"head_dim": 24, "num_attention_heads": 2, "num_key_value_heads": 2}}, 10
        ),
        "one key head": Variant({"text": {"num_attention_heads": 2, "num_key_value_heads": 1}}, 10),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


ARCHITECTURE = "Gemma3ForConditionalGeneration"


def write_files(path: Path) -> Path:
    """Write config, tokenizer and processor files."""
    tokenizer = gemma_tokenizer()
    config = tiny_gemma3_config(tokenizer)
    config.architectures = [ARCHITECTURE]
    config.save_pretrained(path)
    save_gemma3_processor(path, tokenizer, config)
    return path


directory = made_once(write_files)


def model_config(path: Path | None = None, **mm: Any) -> ModelConfig:
    path = path or directory()
    return ModelConfig(
        model="tiny-gemma3",
        path=path,
        hf_config=AutoConfig.from_pretrained(path),
        architecture=ARCHITECTURE,
        max_model_len=4096,
        mm=MultiModalConfig(**mm),
    )


def make_processor(
    path: Path | None = None, *, processor_cache: ProcessorCache | None = None, **mm: Any
) -> BaseMultiModalProcessor[Any]:
    return create_processor(model_config(path, **mm), cache=processor_cache)


hf_processor = hf_of(Gemma3Processor, Gemma3ImageProcessorPil, directory, image_seq_length=4)


def write(folder: Path) -> Path:
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return tiny_gemma3_checkpoint(folder / "gemma3", text={**text, "num_hidden_layers": 6})


CROPS = {"do_pan_and_scan": True}
GEMMA3 = Family(
    name="gemma3",
    architecture=ARCHITECTURE,
    tiny=TINY,
    path=directory,
    write=write,
    needless_files=frozenset({"chat_template.jinja"}),
    published=Published(layouts=THREE_LAYOUTS),
    rendered=(
        "<start_of_turn>user\n"
        "<start_of_image>what is it<end_of_turn>\n"
        "<start_of_turn>model\n"
        "a car<end_of_turn>\n"
        "<start_of_turn>user\n"
        "which color<end_of_turn>\n"
        "<start_of_turn>model\n"
    ),
    with_system=("user\n<start_of_image>", "user\nbe short\n\n<start_of_image>"),
    call_hf=partial(call_processor, hf_processor),
    embed_token_ids=lambda processor: [processor.info.get_tokenizer().image_token_id],
    placeholder="<start_of_image>",
    extra_kwargs=({}, CROPS),
    lowering_kwargs={"pan_and_scan_max_num_crops": 2},
    operator_kwargs=(CROPS,),
    contradictions=(
        (
            "processor_config",
            {"image_processor.size": {"height": 30, "width": 30}},
            "makes 30x30 .* takes 56x56",
        ),
    ),
)
