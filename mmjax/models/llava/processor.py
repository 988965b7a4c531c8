"""LLaVA-1.5's processor: each `<image>` is repeated for each of the tower's features.

Before: `look <image> please`. After: `look <image>*576 please`; all of them take embeddings.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mmjax.errors import CheckpointError
from mmjax.models.family import FamilyInfo, check_settings, make_factories
from mmjax.models.llava.host_inputs import LlavaHostInputs, count_extra_features
from mmjax.processing.image_processors.affine import keep_bytes
from mmjax.processing.image_processors.image import check_resized_pixels, check_squared_pixels

CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- 'USER: ' + message.content + ' ' -}}
    {%- elif message.role == 'assistant' -%}
        {{- 'ASSISTANT: ' + message.content + eos_token -}}
    {%- else -%}
        {{- message.content + ' ' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'ASSISTANT:' -}}
{%- endif -%}
"""
"""Vicuna's turns, in which LLaVA-1.5 was trained."""


class LlavaProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = LlavaHostInputs
    placeholders: ClassVar = {"image": "<image>"}
    hf_updates_prompt = True

    def load_hf_processor(self) -> Any:
        """Assemble the HF processor, from config.json if processor_config.json lacks a value."""
        # Imported here: it imports torch if it is installed.
        from transformers.models.llava.processing_llava import LlavaProcessor

        settings, _ = LlavaProcessor.get_processor_dict(self.ctx.model_config.path)
        hf_config = self.get_hf_config()
        facts = {
            "patch_size": hf_config.vision_config.patch_size,
            "vision_feature_select_strategy": hf_config.vision_feature_select_strategy,
        }
        check_settings(settings, facts)
        processor = LlavaProcessor(
            image_processor=load_image_processor(self.ctx.model_config.path),
            tokenizer=self.get_tokenizer(),
            chat_template=self.ctx.model_config.chat_template,
            image_token=settings.get("image_token", "<image>"),
            num_additional_image_tokens=count_extra_features(hf_config),
            **facts,
        )
        self.check_token(processor.image_token, "image_token_index")
        # HF counts patches, and does not support the strategy "class".
        replacement = processor.image_token * self.num_unit_tokens
        processor.replace_image_token = lambda image_inputs, image_idx, **kwargs: replacement
        return processor

    def check_sizes(self, mm_data: Mapping[str, Any], mm_kwargs: Mapping[str, object]) -> None:
        """Refuse also what HF would pad or scale to a bomb."""
        image_processor = self.get_image_processor()
        images = mm_data.get("images", ())
        max_pixels = self.ctx.get_mm_config().max_image_pixels
        if image_processor.do_pad:
            check_squared_pixels(images, max_pixels)
        else:
            check_resized_pixels(images, image_processor.size.shortest_edge, max_pixels)
        super().check_sizes(mm_data, mm_kwargs)


def load_image_processor(path: Path) -> Any:
    """Load the PIL version of the checkpoint's image processor."""
    # Imported here: they import torch if it is installed.
    from transformers.image_processing_base import ImageProcessingMixin
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    classes = {
        "CLIP": CLIPImageProcessorPil,
        "Llava": LlavaImageProcessorPil,
        "Siglip": SiglipImageProcessorPil,
    }
    settings, _ = ImageProcessingMixin.get_image_processor_dict(path)
    name = settings.get("image_processor_type", "CLIPImageProcessor")
    kind = name.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor")
    if kind not in classes:
        known = ", ".join(f"`{one}ImageProcessor`" for one in classes)
        raise CheckpointError(
            f"`image_processor_type` of the checkpoint is `{name}`; LLaVA is served with {known}"
        )
    return keep_bytes(classes[kind]).from_pretrained(path)


FACTORIES = make_factories(LlavaProcessingInfo)
