"""Qwen2-VL's and Qwen2.5-VL's prompt side: each `<|image_pad|>` or `<|video_pad|>` becomes many.

Qwen2.5-VL's videos come with the seconds of a step, of which the decoder's positions are made.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mmjax.models.family import make_factories
from mmjax.models.grid_family import CHATML_TURNS, GridDataParser, GridInfo
from mmjax.models.qwen2_vl.host_inputs import Qwen25VLHostInputs
from mmjax.processing.image_processors.frames import MIN_FPS
from mmjax.processing.image_processors.patches import TimedVideoPatcher
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_SECONDS = {"second_per_grid_ts": MultiModalFieldConfig.batched("video", keep_on_cpu=True)}

SYSTEM = r"""
{%- if messages[0].role != 'system' -%}
    {{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' -}}
{%- endif -%}
"""


class Qwen25VLDataParser(GridDataParser):
    """Takes the seconds of a step beside the embeddings of a video."""

    keeps_metadata = True
    embedding_fields: ClassVar = {
        **GridDataParser.embedding_fields,
        "video": {**GridDataParser.embedding_fields["video"], "second_per_grid_ts": "optional"},
    }

    def _get_embedding_fields_config(
        self, modality: str, data: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        fields = super()._get_embedding_fields_config(modality, data)
        if modality == "image":
            return fields
        seconds = np.asarray(data.get("second_per_grid_ts", 1.0), np.float32)
        most = 1.0 / MIN_FPS
        if not ((seconds >= 0) & (seconds <= most)).all():
            raise ValueError(f"`second_per_grid_ts` is {seconds.tolist()}; expected 0 to {most:g}")
        return {**fields, **_SECONDS}


class Qwen2VLProcessingInfo(GridInfo):
    chat_template = SYSTEM + CHATML_TURNS


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
    box_unit = "pixels"
    parser = Qwen25VLDataParser
    video_patcher = TimedVideoPatcher

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return {**super().get_fields(outputs), **_SECONDS}


FACTORIES = make_factories(Qwen2VLProcessingInfo)
QWEN2_5_FACTORIES = make_factories(Qwen25VLProcessingInfo)
