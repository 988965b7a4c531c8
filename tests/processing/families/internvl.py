"""The tiny InternVL checkpoint of HF's layout, and HF's own processor as the oracle."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers import AutoTokenizer
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.video_processing_utils import VideoProcessorMixin

from mmjax.processing import BaseMultiModalProcessor
from mmjax.processing.processor import ProcessorCache
from tests.processing.families.family import GOLDEN, Family, HFInputs, golden_processor

PATH = GOLDEN / "internvl"
IMAGE, VIDEO = "<IMG_CONTEXT>", "<video>"


def make_processor(
    *, processor_cache: ProcessorCache | None = None, **mm: Any
) -> BaseMultiModalProcessor[Any]:
    return golden_processor("internvl", processor_cache=processor_cache, **mm)


class WithoutTorchvision(InternVLProcessor):
    """HF's processor, which would refuse any video processor but those of torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        pass


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours; it processes no videos."""
    return WithoutTorchvision(
        GotOcr2ImageProcessorPil.from_pretrained(PATH),
        AutoTokenizer.from_pretrained(PATH),
        VideoProcessorMixin(),
        image_seq_length=4,
    )


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    outputs = hf_processor()(
        text=prompt, images=images or None, return_tensors="np", **(kwargs if images else {})
    )
    return HFInputs(outputs["input_ids"][0].tolist(), outputs)


FEWER = {"images_kwargs": {"max_patches": 3, "min_patches": 2}}
FAMILY = Family(
    name="internvl",
    make_processor=make_processor,
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_hf_config().image_token_id],
    placeholder=IMAGE,
    lowering_kwargs={"images_kwargs": {"max_patches": 2}},
    extra_kwargs=({}, FEWER, {"crop_to_patches": False}),
    mm_configs=(
        {},
        {"mm_processor_kwargs": {"max_patches": 11}},
        {"mm_processor_kwargs": {"crop_to_patches": False}},
        {"trust_request_mm_kwargs": True},
    ),
)
