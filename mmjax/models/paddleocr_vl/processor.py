"""PaddleOCR-VL's prompt side: each `<|IMAGE_PLACEHOLDER|>` becomes one for each 28 x 28 pixels.

A prompt is a picture and a task: `OCR:`, `Table Recognition:`, `Formula Recognition:`, `Chart
Recognition:`.
"""

from typing import ClassVar

from mmjax.models.family import make_factories
from mmjax.models.grid_family import GridInfo
from mmjax.models.paddleocr_vl.host_inputs import PaddleOCRVLHostInputs
from mmjax.processing.image_processors.patches import keep_bytes_row_by_row

CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- 'User: ' -}}
    {%- elif message.role == 'assistant' -%}
        {{- 'Assistant: ' -}}
    {%- endif -%}
    {%- for part in message.content -%}
        {%- if part.type == 'image' -%}
            {{- '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' -}}
        {%- else -%}
            {{- part.text -}}
        {%- endif -%}
    {%- endfor -%}
    {{- eos_token if message.role == 'assistant' else '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'Assistant: ' -}}
{%- endif -%}
"""


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
    keep_bytes = keep_bytes_row_by_row
    limits: ClassVar = {"image": None}
    placeholders: ClassVar = {"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"}


FACTORIES = make_factories(PaddleOCRVLProcessingInfo)
