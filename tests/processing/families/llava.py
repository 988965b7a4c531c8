"""LLaVA's tiny golden directory, and HF's processor as the oracle."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from transformers import AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor

from tests.processing.families.family import GOLDEN, Family, HFInputs, golden_processor


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours."""
    path = GOLDEN / "llava"
    return LlavaProcessor(
        CLIPImageProcessorPil.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    outputs = hf_processor()(text=prompt, images=images or None, return_tensors="np", **kwargs)
    return HFInputs(outputs["input_ids"][0].tolist(), outputs)


FAMILY = Family(
    name="llava",
    make_processor=partial(golden_processor, "llava"),
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_hf_config().image_token_id],
    placeholder="<image>",
    words=(*Family.words, *("<s>", "</s>", "<pad>")),
)
