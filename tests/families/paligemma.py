"""Tiny PaliGemmas: SigLIP before Gemma 1 and Gemma 2, prompts that see themselves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Gemma2Config, GemmaConfig, PaliGemmaConfig, SiglipVisionConfig
from transformers import PaliGemmaForConditionalGeneration as HFModel
from transformers.models.paligemma.processing_paligemma import EXTRA_TOKENS, PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from mmjax.models.paligemma.model import PaliGemmaForConditionalGeneration
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.families.directories import made_once, write_directory
from tests.families.family import Family, HFInputs, call_processor, hf_of, written
from tests.families.published import THREE_LAYOUTS, Published
from tests.families.sizes import NO_KEYS, Keys, fit_text, resize_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes, joined
from tests.kit import gemma_tokenizer

IMAGE_TOKEN = 130
DECODERS = {"gemma": GemmaConfig, "gemma2": Gemma2Config}


def tiny_config(
    *,
    decoder: str = "gemma2",
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    image_token_id: int = IMAGE_TOKEN,
) -> PaliGemmaConfig:
    """Return a config of width 32, whose sliding layers see fewer tokens than a prompt has."""
    own = {"query_pre_attn_scalar": 12, "sliding_window": 9} if decoder == "gemma2" else {}
    settings: dict[str, Any] = {
        **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"max_position_embeddings": 1024, "pad_token_id": 0, **own, **text},
    }
    tower: dict[str, Any] = {
        **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        **{"vision_use_head": False, **vision},
    }
    return PaliGemmaConfig(
        text_config=DECODERS[decoder](**settings),
        vision_config=SiglipVisionConfig(**tower),
        image_token_index=image_token_id,
        projection_dim=settings["hidden_size"],
        hidden_size=settings["hidden_size"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    side = config.vision_config.image_size
    ids = [config.image_token_id] * (side // config.vision_config.patch_size) ** 2
    tensors = {"pixel_values": draw_bytes(media.seed, (1, 3, side, side)), "image_affine": AFFINE}
    return DrawnItem(tensors, ids)


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it: all of it is a prompt."""
    inputs = make_reference_inputs(sample.token_ids, joined(sample))
    return inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    return resize_text(width, head_dim, num_heads, query_pre_attn_scalar=head_dim)


TINY = TinyFamily(
    name="paligemma",
    model_class=PaliGemmaForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(5, 128),
    published_head_dim=256,
    max_embeds={"image": 4},
    longest_run=96,
    variants={
        "gemma 2": Variant({}, 10),
        "gemma 2, as many key heads, biases, no caps": Variant(
            {
                "text": {
                    **{"num_key_value_heads": 4, "attention_bias": True},
                    **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
                }
            },
            10,
        ),
        "gemma 1": Variant({"decoder": "gemma"}, 10),
        "gemma 1, one key head, more patches": Variant(
            {"decoder": "gemma", "text": {"num_key_value_heads": 1}, "vision": {"image_size": 42}},
            10,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


def make_tokenizer() -> Any:
    """Return Gemma's, with the tokens of images, places and masks."""
    tokenizer = gemma_tokenizer(named={"image_token": "<image>"})
    tokenizer.add_tokens(EXTRA_TOKENS)
    return tokenizer


def write_files(path: Path) -> Path:
    """Write the files of a checkpoint without weights."""
    tokenizer = make_tokenizer()
    config: Any = tiny_config(
        text=fit_text(tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    config.architectures = [PALIGEMMA.architecture]
    side = config.vision_config.image_size
    preprocessor = {
        **{"image_processor_type": "SiglipImageProcessor", "image_seq_length": 4},
        **{"size": {"height": side, "width": side}, "processor_class": "PaliGemmaProcessor"},
    }
    own = {"processor_class": "PaliGemmaProcessor"}
    parts = {"preprocessor_config": preprocessor, "processor_config": own}
    return write_directory(path, config, tokenizer, **parts)


path = made_once(write_files)


hf_processor = hf_of(PaliGemmaProcessor, SiglipImageProcessorPil, path)


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Call HF's processor, which refuses a text alone: it is framed as its class frames others."""
    if images:
        return call_processor(hf_processor, prompt, images, kwargs)
    tokenizer = hf_processor().tokenizer
    ids = tokenizer.encode(f"{tokenizer.bos_token}{prompt}\n", add_special_tokens=False)
    return HFInputs(ids, {"token_type_ids": np.zeros((1, len(ids)), np.int64)})


PALIGEMMA = Family(
    **written(TINY, write_files),
    needless_files=frozenset({"processor_config.json"}),
    published=Published(layouts=THREE_LAYOUTS),
    rendered="<image>which color",
    call_hf=call_hf,
    placeholder="<image>",
    contradictions=(
        (
            "preprocessor_config",
            {"size": {"height": 30, "width": 30}},
            "makes 30x30 .* takes 28x28",
        ),
        ("preprocessor_config", {"image_seq_length": 9}, "`image_seq_length` .* is 9"),
        ("config", {"image_token_index": 7}, "`<image>` is token"),
    ),
)
