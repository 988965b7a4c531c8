"""The tiny Qwen2-VL checkpoint, and HF's own processor (its video side a stub) as the oracle."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from transformers import AutoTokenizer
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.video_processing_utils import VideoProcessorMixin

from mmjax.processing import BaseMultiModalProcessor
from mmjax.processing.processor import ProcessorCache
from tests.processing.families.family import (
    GOLDEN,
    Family,
    HFInputs,
    edit_golden,
    golden_processor,
)

PATH = GOLDEN / "qwen2_vl"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
SMALLER = {"size": {"shortest_edge": 3136, "longest_edge": 20_000}}


def make_processor(
    *, processor_cache: ProcessorCache | None = None, **mm: Any
) -> BaseMultiModalProcessor[Any]:
    return golden_processor("qwen2_vl", processor_cache=processor_cache, **mm)


class WithoutTorchvision(Qwen2VLProcessor):
    """HF's processor, which would refuse any video processor but those of torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        pass


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours; it processes no videos."""
    return WithoutTorchvision(
        Qwen2VLImageProcessorPil.from_pretrained(PATH),
        AutoTokenizer.from_pretrained(PATH),
        VideoProcessorMixin(),
    )


def call_processor(
    load: Callable[[], Any], prompt: str, images: list[Any], kwargs: Mapping[str, Any]
) -> HFInputs:
    outputs = load()(
        text=prompt, images=images or None, return_tensors="np", **(kwargs if images else {})
    )
    return HFInputs(outputs["input_ids"][0].tolist(), outputs)


FAMILY = Family(
    name="qwen2_vl",
    make_processor=make_processor,
    call_hf=partial(call_processor, hf_processor),
    embed_token_ids=lambda processor: [processor.info.get_hf_config().image_token_id],
    placeholder=IMAGE,
    extra_kwargs=({}, {"images_kwargs": SMALLER}),
    mm_configs=(
        {},
        {"mm_processor_kwargs": SMALLER},
        {"mm_processor_kwargs": {"max_pixels": 30_000}},
        {"trust_request_mm_kwargs": True},
    ),
    lowering_kwargs={"max_pixels": 30_000},
    tensors={"pixel_values": 1e-6, "image_grid_thw": 0.0},
    takes_size=lambda width, height: max(width, height) <= 200 * min(width, height),
)


# ---- Qwen2.5-VL ----------------------------------------------------------------------------------

QWEN2_5: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config.model_type": "qwen2_5_vl_text",
    "vision_config.model_type": "qwen2_5_vl_vision",
    "vision_config.out_hidden_size": 64,
}


class Qwen25WithoutTorchvision(Qwen2_5_VLProcessor):
    """As `WithoutTorchvision`."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        pass


@cache
def write_qwen2_5() -> Path:
    """Write a Qwen2.5-VL's directory, without weights, once."""
    return edit_golden("qwen2_vl", Path(mkdtemp(prefix="mmjax-qwen2-5-")), config=QWEN2_5)


def make_qwen2_5(**settings: Any) -> BaseMultiModalProcessor[Any]:
    return golden_processor("qwen2_vl", path=write_qwen2_5(), **settings)


@cache
def hf_qwen2_5(video_processor: Any = None) -> Any:
    """HF's own processor; the video side is a stub."""
    path = write_qwen2_5()
    return Qwen25WithoutTorchvision(
        Qwen2VLImageProcessorPil.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
        video_processor or VideoProcessorMixin(),
    )


VARIANTS = {
    "qwen2_5_vl": replace(
        FAMILY,
        make_processor=make_qwen2_5,
        call_hf=partial(call_processor, hf_qwen2_5),
    )
}
