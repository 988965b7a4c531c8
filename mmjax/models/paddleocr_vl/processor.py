"""PaddleOCR-VL's prompt side: each `<|IMAGE_PLACEHOLDER|>` becomes one for each 28 x 28 pixels.

A prompt is a picture and a task: `OCR:`, `Table Recognition:`, `Formula Recognition:`, `Chart
Recognition:`.
"""

from collections.abc import Mapping
from typing import ClassVar

from mmjax.models.family import make_factories
from mmjax.models.paddleocr_vl.host_inputs import PaddleOCRVLHostInputs
from mmjax.models.qwen2_vl.processor import Qwen2VLProcessingInfo, check_patches
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.image_processors.patches import ImagePatcher, keep_bytes_row_by_row

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


class PaddleOCRVLProcessingInfo(Qwen2VLProcessingInfo):
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = {
        "Read text": "OCR:",
        "Table": "Table Recognition:",
        "Formula": "Formula Recognition:",
        "Chart": "Chart Recognition:",
    }
    host_inputs = PaddleOCRVLHostInputs
    limits: ClassVar = {"image": None}
    placeholders: ClassVar = {"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"}

    def load_hf_processor(self) -> ProcessorOfParts:
        """Assemble the HF processor's parts, in which patches stay bytes."""
        # Imported here: it imports torch if it is installed.
        from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
            PaddleOCRVLImageProcessorPil,
        )

        own = keep_bytes_row_by_row(PaddleOCRVLImageProcessorPil)
        patcher = ImagePatcher(
            own.from_pretrained(self.ctx.model_config.path),
            max_pixels_resized=self.ctx.model_config.mm.max_image_pixels,
        )
        vision = self.get_hf_config().vision_config
        check_patches(patcher, (vision.patch_size, vision.spatial_merge_size, 1))
        return ProcessorOfParts(tokenizer=self.get_tokenizer(), image_processor=patcher)

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        return {"image": self.get_largest_frame("image")[1]}


FACTORIES = make_factories(PaddleOCRVLProcessingInfo)
