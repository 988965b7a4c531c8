"""Qwen2-VL's and Qwen2.5-VL's prompt side: each `<|image_pad|>` or `<|video_pad|>` becomes many.

Qwen2.5-VL's videos come with the seconds of a step, of which the decoder's positions are made.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from mmjax.models.family import make_factories
from mmjax.models.grid_family import CHATML_TURNS, SECONDS_OF_STEPS, GridInfo, TimedDataParser
from mmjax.models.qwen2_vl.host_inputs import Qwen25VLHostInputs
from mmjax.models.retrieval.prompts import (
    RetrievalInfo,
    RetrievalProcessor,
    write_chat_template,
)
from mmjax.processing.answers import JSON_IN_PIXELS, QWEN2_VL
from mmjax.processing.chat_turns import QWEN_SYSTEM
from mmjax.processing.image_processors.patches import TimedVideoPatcher
from mmjax.processing.tensors.fields import MultiModalFieldConfig


class Qwen2VLProcessingInfo(GridInfo):
    chat_template = QWEN_SYSTEM + CHATML_TURNS
    answer_form = QWEN2_VL


class Qwen25VLProcessingInfo(Qwen2VLProcessingInfo):
    tasks: ClassVar = {
        "Boxes": (
            "Outline the position of {each small cake} and output all the coordinates in JSON "
            "format."
        ),
        "Text with places": (
            "Spotting all the text in the image with line-level, and output in JSON format."
        ),
        "Page to HTML": "QwenVL HTML",
    }
    host_inputs = Qwen25VLHostInputs
    answer_form = JSON_IN_PIXELS
    data_parser = TimedDataParser
    video_patcher = TimedVideoPatcher

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return {**super().get_fields(outputs), **SECONDS_OF_STEPS}


class ColQwen2ProcessingInfo(RetrievalInfo, Qwen2VLProcessingInfo):
    chat_template = write_chat_template(Qwen2VLProcessingInfo.placeholders["image"])
    query_prefix = "Query: "
    visual_prompt = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
        "<|im_end|><|endoftext|>"
    )


FACTORIES = make_factories(Qwen2VLProcessingInfo)
COLQWEN2_FACTORIES = make_factories(ColQwen2ProcessingInfo, RetrievalProcessor)
QWEN2_5_FACTORIES = make_factories(Qwen25VLProcessingInfo)
