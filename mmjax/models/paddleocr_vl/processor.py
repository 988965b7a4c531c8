"""PaddleOCR-VL's prompt side: each `<|IMAGE_PLACEHOLDER|>` becomes one for each 28 x 28 pixels.

A prompt is a picture and a task: `OCR:`, `Table Recognition:`, `Formula Recognition:`, `Chart
Recognition:`.
"""

from typing import ClassVar

from mmjax.models.family import make_factories
from mmjax.models.grid_family import GridInfo
from mmjax.models.paddleocr_vl.host_inputs import PaddleOCRVLHostInputs
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.image_processors.patches import RowByRow

CHAT_TEMPLATE = write_turns(
    start="{'user': 'User: ', 'assistant': 'Assistant: '}[message.role]",
    content=write_parts(image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
    end=r"eos_token if message.role == 'assistant' else '\n'",
    answer="'Assistant: '",
)


class PaddleOCRVLProcessingInfo(GridInfo):
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = {
        "Read text": "OCR:",
        "Table": "Table Recognition:",
        "Formula": "Formula Recognition:",
        "Chart": "Chart Recognition:",
    }
    host_inputs = PaddleOCRVLHostInputs
    image_processors: ClassVar = {"PaddleOCRVL": "paddleocr_vl"}
    patch_class = RowByRow
    limits: ClassVar = {"image": None}
    placeholders: ClassVar = {"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"}

    @property
    def patch_depth(self) -> int:
        """One frame: published files have a `temporal_patch_size` of 2, which no tower reads."""
        return 1


FACTORIES = make_factories(PaddleOCRVLProcessingInfo)
