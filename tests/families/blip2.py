"""Tiny BLIP-2s: an image's queries stand before the text, and there is at most one image."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, Blip2Config, OPTConfig
from transformers import Blip2ForConditionalGeneration as HFModel
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.blip_2.processing_blip_2 import Blip2Processor

from mmjax.models.blip2.model import Blip2ForConditionalGeneration
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.families.directories import edit_golden, golden_path, save_weights
from tests.families.family import Family, call_processor, hf_of
from tests.families.published import Published
from tests.families.sizes import NO_KEYS, TOWER, Keys
from tests.families.tiny import (
    AFFINE,
    DrawnItem,
    Media,
    Part,
    TinyFamily,
    Variant,
    draw_bytes,
    listed,
)

IMAGE_TOKEN, NUM_QUERIES = 120, 5
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
VISION: dict[str, Any] = {
    **TOWER,
    "image_size": 32,
    "patch_size": 8,
}
QFORMER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def tiny_config(
    *,
    text: Keys = NO_KEYS,
    vision: Keys = NO_KEYS,
    qformer: Keys = NO_KEYS,
    num_queries: int = NUM_QUERIES,
) -> Any:
    """Return a config; the arguments are keys that differ from the above."""
    return Blip2Config(
        text_config=OPTConfig(**{**TEXT, **text}),
        vision_config={**VISION, **vision},
        qformer_config={**QFORMER, **qformer},
        num_query_tokens=num_queries,
        image_token_index=IMAGE_TOKEN,
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image."""
    side = config.vision_config.image_size
    tensors = {"pixel_values": draw_bytes(media.seed, (3, side, side)), "image_affine": AFFINE}
    return DrawnItem(tensors, [IMAGE_TOKEN] * config.num_query_tokens)


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it, without a mask."""
    inputs = make_reference_inputs(sample.token_ids, listed(sample))
    del inputs["attention_mask"]
    return inputs


class TextAlone(torch.nn.Module):
    """HF's language model under its name in the whole model, which takes no text without images."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.language_model = reference.language_model
        self.config = reference.config.get_text_config()

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.language_model(**inputs)

    def generate(self, **options: Any) -> Any:
        return self.language_model.generate(**options)


class Blip2Family(TinyFamily):
    """Images first, and text alone by the language model."""

    def draw_sample(self, config: Any, parts: Sequence[Part]) -> Sample:
        """Return a prompt of the parts, images first."""
        return super().draw_sample(config, sorted(parts, key=lambda p: not isinstance(p, Media)))

    def torch_call(self, reference: Any, sample: Sample) -> tuple[Any, dict[str, Any]]:
        """Return the module that takes the sample, and the sample as it takes it."""
        module = reference if sample.items else TextAlone(reference)
        return module, self.torch_inputs(reference, sample)


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder."""
    if num_heads * head_dim != width:
        raise ValueError(f"{num_heads} heads of {head_dim} are not {width}, as OPT's must be")
    return {"text": {"hidden_size": width, "num_attention_heads": num_heads}}


TINY = Blip2Family(
    name="blip2",
    model_class=Blip2ForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(8, IMAGE_TOKEN),
    published_head_dim=80,
    max_embeds={"image": NUM_QUERIES},
    max_items=1,
    variants={
        "plain": Variant({}, 12),
        "cross-attention in every block, a text branch, another decoder": Variant(
            {
                "qformer": {"cross_attention_frequency": 1, "use_qformer_text_input": True},
                "text": {
                    "do_layer_norm_before": False,
                    "tie_word_embeddings": False,
                    "enable_bias": False,
                },
            },
            11,
        ),
        "other tower": Variant(
            {
                "vision": {"qkv_bias": False, "image_size": 37, "hidden_act": "gelu_pytorch_tanh"},
                "num_queries": 1,
            },
            12,
        ),
    },
)


def tiny_blip2_checkpoint(folder: Path) -> Path:
    """Write a directory with tokenizer, processor and random weights; return it."""
    path = edit_golden("blip2", folder)
    TINY.make_reference(config=AutoConfig.from_pretrained(path)).save_pretrained(path)
    return path


# ---- its prompts and directories ----------------------------------------------------------------


path = partial(golden_path, "blip2")
hf_processor = hf_of(Blip2Processor, BlipImageProcessorPil, path, num_query_tokens=8)


def write(folder: Path) -> Path:
    heads = {"text_config.num_attention_heads": 4}
    return save_weights(edit_golden("blip2", folder, config=heads))


BLIP2 = Family(
    name="blip2",
    architecture="Blip2ForConditionalGeneration",
    tiny=TINY,
    path=path,
    write=write,
    needless_files=frozenset({"tokenizer_config.json"}),
    probed=("qformer.encoder.layer.1", "language_projection"),
    published=Published(
        # Of the text branch, which files of the retrieval models have.
        unread=(
            "qformer.embeddings.word_embeddings.weight",
            "qformer.encoder.layer.0.intermediate.dense.weight",
            "qformer.encoder.layer.0.output.LayerNorm.bias",
        ),
    ),
    rendered="Question: what is it Answer: a car Question: which color Answer:",
    with_system=("Question: what", "be short Question: what"),
    call_hf=partial(call_processor, hf_processor),
    embed_token_ids=lambda processor: [processor.info.get_embed_token_id("image")],
    min_images=1,
    max_images=1,
    words=(*Family.words, *("</s>", "<s>", "<pad>")),
    contradictions=(
        (
            "processor_config",
            {"image_processor.size": {"height": 30, "width": 30}},
            "makes 30x30 .* takes 56x56",
        ),
    ),
)
