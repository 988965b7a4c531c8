"""Qwen3-VL's and Qwen3.5's prompt side: grids, and each step of a video has its second before it.

Before: `<|video_pad|>`. After, for each step of the video: `<0.3 seconds> <|vision_start|>
<|video_pad|>*N <|vision_end|>`, of which the pads take embeddings. What the chat template has
around the first stays, as in transformers from 5.10 on.
"""

from typing import ClassVar

from mmjax.models.family import make_factories
from mmjax.models.grid_family import CHATML_TURNS, StampedGridInfo
from mmjax.models.qwen3_vl.host_inputs import Qwen3VLHostInputs
from mmjax.processing.answers import JSON_IN_THOUSANDTHS


class Qwen3VLProcessingInfo(StampedGridInfo):
    chat_template = CHATML_TURNS
    tasks: ClassVar = {
        "Boxes": (
            'Locate every instance that belongs to the following categories: "{head, hand}". '
            "Report bbox coordinates in JSON format."
        ),
        "Text with places": (
            "Spotting all the text in the image with line-level, and output in JSON format."
        ),
        "Page to HTML": "qwenvl html",
        "Page to Markdown": "qwenvl markdown",
    }
    host_inputs = Qwen3VLHostInputs
    answer_form = JSON_IN_THOUSANDTHS


class Qwen35ProcessingInfo(Qwen3VLProcessingInfo):
    tasks: ClassVar = {}


FACTORIES = make_factories(Qwen3VLProcessingInfo)
QWEN3_5_FACTORIES = make_factories(Qwen35ProcessingInfo)
