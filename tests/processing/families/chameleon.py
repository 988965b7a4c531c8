"""Chameleon's tiny golden directory, and HF's processor as the oracle."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from transformers import AutoTokenizer
from transformers.models.chameleon.image_processing_pil_chameleon import ChameleonImageProcessorPil
from transformers.models.chameleon.processing_chameleon import ChameleonProcessor

from tests.processing.families.family import GOLDEN, Family, HFInputs, golden_processor


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours."""
    path = GOLDEN / "chameleon"
    return ChameleonProcessor(
        ChameleonImageProcessorPil.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
        image_seq_length=256,
    )


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    outputs = hf_processor()(text=prompt, images=images or None, return_tensors="np", **kwargs)
    return HFInputs(outputs["input_ids"][0].tolist(), outputs)


COMPLETION = {"return_for_text_completion": True}
FAMILY = Family(
    name="chameleon",
    make_processor=partial(golden_processor, "chameleon"),
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_embed_token_id("image")],
    placeholder="<image>",
    extra_kwargs=({}, COMPLETION),
    words=(*Family.words, *("<s>", "</s>", "<racm3:break>", "<eoss>")),
)
