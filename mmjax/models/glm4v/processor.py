"""The prompt side of GLM-4.1V, 4.6V and GLM-OCR: each `<|image|>` becomes one for each square.

Before: `<|begin_of_image|> <|image|> <|end_of_image|>`. After: `<|begin_of_image|> <|image|>*N
<|end_of_image|>`, all N take embeddings; N is the item's grid over merge_size^2.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from mmjax.models.family import make_factories
from mmjax.models.glm4v.host_inputs import Glm4vHostInputs, GlmOcrHostInputs
from mmjax.models.qwen2_vl.processor import Qwen2VLProcessingInfo, check_patches
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.image_processors.patches import ImagePatcher, keep_bytes_of_patches

CHAT_TEMPLATE = r"""
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
    {{- '<|' + message.role + '|>\n' -}}
    {%- for part in message.content -%}
        {%- if part.type == 'image' -%}
            {{- '<|begin_of_image|><|image|><|end_of_image|>' -}}
        {%- else -%}
            {{- part.text -}}
        {%- endif -%}
    {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>\n' -}}
{%- endif -%}
"""


class GlmImagePatcher(ImagePatcher):
    """HF's image processor, whose numbers of pixels are of all frames of a patch together."""

    @property
    def valid_kwargs(self) -> frozenset[str]:
        return super().valid_kwargs | {"min_pixels", "max_pixels"}

    def get_frame_pixels(self, kwargs: Mapping[str, Any]) -> int:
        """Return the largest number of pixels of an image."""
        return self.get_pixel_limits(kwargs)[1] // self.hf.temporal_patch_size


class Glm4vProcessingInfo(Qwen2VLProcessingInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = Glm4vHostInputs
    limits: ClassVar = {"image": None}
    placeholders: ClassVar = {"image": "<|begin_of_image|><|image|><|end_of_image|>"}

    def load_hf_processor(self) -> ProcessorOfParts:
        """Assemble the HF processor's parts: AutoProcessor needs torchvision for videos."""
        # Imported here: it imports torch if it is installed.
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

        processor_class = keep_bytes_of_patches(Glm4vImageProcessorPil)
        patcher = GlmImagePatcher(
            processor_class.from_pretrained(self.ctx.model_config.path),
            max_pixels_resized=self.ctx.model_config.mm.max_image_pixels,
        )
        vision = self.get_hf_config().vision_config
        sizes = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        check_patches(patcher, sizes)
        return ProcessorOfParts(tokenizer=self.get_tokenizer(), image_processor=patcher)

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        return {"image": self.get_largest_frame("image")[1]}


class GlmGroundingProcessingInfo(Glm4vProcessingInfo):
    """GLM-4.5V's and 4.6V's, which were trained to find what is described."""

    tasks: ClassVar = {
        "Boxes": "Help me to locate {the red cup} in the image and give me its bounding boxes."
    }


class GlmOcrProcessingInfo(Glm4vProcessingInfo):
    tasks: ClassVar = {
        "Read text": "Text Recognition:",
        "Table": "Table Recognition:",
        "Formula": "Formula Recognition:",
    }
    host_inputs = GlmOcrHostInputs


FACTORIES = make_factories(Glm4vProcessingInfo)
GROUNDING_FACTORIES = make_factories(GlmGroundingProcessingInfo)
OCR_FACTORIES = make_factories(GlmOcrProcessingInfo)
