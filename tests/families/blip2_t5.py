"""Tiny BLIP-2s with T5: an image's queries stand before the text in the encoder's prompt."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Blip2Config, GenerationConfig, T5Config
from transformers import Blip2ForConditionalGeneration as HFModel
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.blip_2.processing_blip_2 import Blip2Processor

from mmjax.models.blip2.model import Blip2T5ForConditionalGeneration
from mmjax.parity.arrays import Sample
from mmjax.rounding import round_up
from tests.families.blip2 import QFORMER, VISION, TextAlone, draw_item
from tests.families.directories import made_once, make_tokenizer, write_directory
from tests.families.encdec import EncDecFamily, torch_inputs
from tests.families.family import Family, call_processor, hf_of, written
from tests.families.published import Published
from tests.families.sizes import NO_KEYS, Keys
from tests.families.tiny import Variant
from tests.oracle import fill_with_unit_norms

IMAGE_TOKEN, NUM_QUERIES, START = 120, 5, 0
TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "n_positions": 64,
    "decoder_start_token_id": START,
}


def tiny_config(
    *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, num_queries: int = NUM_QUERIES
) -> Any:
    """Return a config; the arguments are keys that differ from the above."""
    return Blip2Config(
        text_config=T5Config(**{**TEXT, **text}),
        vision_config={**VISION, **vision},
        qformer_config=QFORMER,
        num_query_tokens=num_queries,
        image_token_index=IMAGE_TOKEN,
        architectures=["Blip2ForConditionalGeneration"],
    )


class Blip2T5Family(EncDecFamily):
    """Text alone is the language model's, which the whole model takes none of without images."""

    def make_reference(self, *, config: Any = None, **settings: Any) -> Any:
        """Return HF's model, random, whose `generate` never ends a text."""
        model = super().make_reference(config=config, **settings)
        generation = GenerationConfig(pad_token_id=0, decoder_start_token_id=START)
        model.generation_config = model.language_model.generation_config = generation
        return model

    def torch_call(self, reference: Any, sample: Sample) -> tuple[Any, dict[str, Any]]:
        """Return the module that takes the sample, and the sample as it takes it."""
        module = reference if sample.items else TextAlone(reference)
        return module, self.torch_inputs(reference, sample)


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another text model."""
    return {"text": {"d_model": width, "d_kv": head_dim, "num_heads": num_heads}}


def fill(model: Any) -> None:
    """Fill with random values; scores, which T5 does not scale, as large as others' are.

    What the decoder takes from the encoder is loud: else its own last token decides every answer.
    """
    fill_with_unit_norms(model, sharpness=1.4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("relative_attention_bias.weight", "EncDecAttention.o.weight")):
                parameter *= 3


TINY = Blip2T5Family(
    name="blip2_t5",
    model_class=Blip2T5ForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    start=START,
    word_ids=range(8, IMAGE_TOKEN),
    published_head_dim=64,
    max_embeds={"image": NUM_QUERIES},
    max_items=1,
    max_model_len=56,
    fill=fill,
    variants={
        "plain": Variant({}, 15),
        "the first T5, of more decoder layers": Variant(
            {
                "text": {
                    "feed_forward_proj": "relu",
                    "tie_word_embeddings": True,
                    "num_layers": 1,
                    "num_decoder_layers": 3,
                    "relative_attention_num_buckets": 32,
                    "relative_attention_max_distance": 128,
                },
                "num_queries": 1,
            },
            15,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


def write_files(path: Path) -> Path:
    tokenizer = make_tokenizer(["<image>"], eos="</s>", ends_with_eos=True)
    config = tiny_config(text={"vocab_size": round_up(len(tokenizer), 64)})
    config.image_token_index = tokenizer.convert_tokens_to_ids("<image>")
    side = config.vision_config.image_size
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={
            "image_processor_type": "BlipImageProcessor",
            "size": {"height": side, "width": side},
        },
        processor_config={
            "num_query_tokens": NUM_QUERIES,
            "processor_class": "Blip2Processor",
        },
    )


path = made_once(write_files)


hf_processor = hf_of(Blip2Processor, BlipImageProcessorPil, path, num_query_tokens=NUM_QUERIES)
BLIP2_T5 = Family(
    **written(TINY, write_files),
    needless_files=frozenset({"tokenizer_config.json", "processor_config.json"}),
    llm_settings={"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64},
    published=Published(
        left_out=("coder.embed_tokens.weight", "lm_head.weight"),
        unread=(
            "qformer.embeddings.word_embeddings.weight",
            "language_model.encoder.embed_tokens.weight",
            "language_model.decoder.embed_tokens.weight",
            "language_model.decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        ),
    ),
    rendered="Question: what is it Answer: a car Question: which color Answer:",
    with_system=("Question: what", "be short Question: what"),
    takes_embeds=False,
    call_hf=partial(call_processor, hf_processor),
    embed_token_ids=lambda processor: [processor.info.get_embed_token_id("image")],
    min_images=1,
    max_images=1,
    updates_encoder_prompt=True,
    words=(*Family.words, "</s>", "<pad>"),
)
