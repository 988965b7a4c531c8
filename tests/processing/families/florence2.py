"""The tiny Florence-2 checkpoint, and HF's own processor as the oracle."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers import AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.florence2.processing_florence2 import Florence2Processor

from mmjax.processing import BaseMultiModalProcessor
from mmjax.processing.processor import ProcessorCache
from tests.processing.families.family import GOLDEN, Family, HFInputs, golden_processor

PATH = GOLDEN / "florence2"


def make_processor(
    *, processor_cache: ProcessorCache | None = None, **mm: Any
) -> BaseMultiModalProcessor[Any]:
    return golden_processor("florence2", processor_cache=processor_cache, **mm)


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours."""
    return Florence2Processor(
        CLIPImageProcessorPil.from_pretrained(PATH),
        AutoTokenizer.from_pretrained(PATH),
        num_additional_image_tokens=1,
    )


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    # HF takes a list of prompts as given, and a lone one as a batch where it has a picture only.
    outputs = hf_processor()(
        text=[prompt], images=images or None, return_tensors="np", **(kwargs if images else {})
    )
    return HFInputs([int(token_id) for token_id in outputs["input_ids"][0]], outputs)


FAMILY = Family(
    name="florence2",
    make_processor=make_processor,
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_hf_config().image_token_id],
    max_images=1,
    extra_kwargs=({}, {"images_kwargs": {"do_normalize": False}}),
    updates_encoder_prompt=True,
)
