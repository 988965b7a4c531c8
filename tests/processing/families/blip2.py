"""BLIP-2's tiny golden directory, and HF's processor as the oracle."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from transformers import AutoTokenizer
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.blip_2.processing_blip_2 import Blip2Processor

from tests.processing.families.family import GOLDEN, Family, HFInputs, golden_processor


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours."""
    path = GOLDEN / "blip2"
    return Blip2Processor(
        BlipImageProcessorPil.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
        num_query_tokens=8,
    )


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    outputs = hf_processor()(text=prompt, images=images or None, return_tensors="np", **kwargs)
    return HFInputs(outputs["input_ids"][0].tolist(), outputs)


FAMILY = Family(
    name="blip2",
    make_processor=partial(golden_processor, "blip2"),
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_embed_token_id("image")],
    max_images=1,
    words=(*Family.words, *("</s>", "<s>", "<pad>")),
)
