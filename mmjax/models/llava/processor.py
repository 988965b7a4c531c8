"""LLaVA-1.5's processor: each `<image>` is repeated for each of the tower's features.

Before: `look <image> please`. After: `look <image>*576 please`; all of them take embeddings.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import BatchFeature

from mmjax.errors import CheckpointError
from mmjax.models.llava import pixtral
from mmjax.models.llava.host_inputs import (
    count_extra_features,
    count_image_tokens,
    has_pixtral_tower,
)
from mmjax.models.registry import ProcessorFactories
from mmjax.processing.context import BaseProcessingInfo, InputProcessingContext
from mmjax.processing.dummy_inputs import ImageDummyInputsBuilder
from mmjax.processing.image_processors.affine import keep_bytes
from mmjax.processing.image_processors.image import (
    check_pixel_size,
    check_resized_pixels,
    check_squared_pixels,
)
from mmjax.processing.items.parse import (
    ImageEmbeddingItems,
    ImageEmbedsDataParser,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
)
from mmjax.processing.prepared import ProcessorCache
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.prompt_updates.updates import PromptReplacement, PromptUpdate
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.tensors.inputs import MultiModalKwargsItems

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


class LlavaProcessingInfo(BaseProcessingInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImageEmbedsDataParser

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return "<image>" if modality == "image" else None

    @cached_property
    def num_image_tokens(self) -> int:
        """How many embeddings an image has."""
        return count_image_tokens(self.get_hf_config())

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
        for name, value in facts.items():
            if settings.get(name) not in (None, value):
                raise CheckpointError(
                    f"`{name}` of processor_config.json is {settings[name]!r}, but config.json has "
                    f"{value!r}; make them equal"
                )
        processor = LlavaProcessor(
            image_processor=load_image_processor(self.ctx.model_config.path),
            tokenizer=self.get_tokenizer(),
            chat_template=self.ctx.model_config.chat_template,
            image_token=settings.get("image_token", "<image>"),
            num_additional_image_tokens=count_extra_features(hf_config),
            **facts,
        )
        if processor.image_token_id != hf_config.image_token_id:
            raise CheckpointError(
                f"`{processor.image_token}` is token {processor.image_token_id}, but "
                f"`image_token_index` of config.json is {hf_config.image_token_id}"
            )
        # HF counts patches, and does not support the strategy "class".
        replacement = processor.image_token * self.num_image_tokens
        processor.replace_image_token = lambda image_inputs, image_idx, **kwargs: replacement
        return processor

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        return {"image": self.num_image_tokens}


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


class LlavaDummyInputsBuilder(ImageDummyInputsBuilder[LlavaProcessingInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return self.info.get_hf_processor().image_token * mm_counts.get("image", 0)

    def get_largest_image(self) -> ImageSize:
        side = self.info.get_hf_config().vision_config.image_size
        return ImageSize(width=side, height=side)


class LlavaMultiModalProcessor(BaseMultiModalProcessor[LlavaProcessingInfo]):
    only_tokenizes_text = True

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        image_processor = self.info.get_hf_processor().image_processor
        images = mm_data.get("images", ())
        max_pixels = self.info.ctx.get_mm_config().max_image_pixels
        if image_processor.do_pad:
            check_squared_pixels(images, max_pixels)
        else:
            check_resized_pixels(images, image_processor.size.shortest_edge, max_pixels)
        outputs = super()._call_hf_processor(prompt, mm_data, mm_kwargs, tok_kwargs)
        if "pixel_values" in outputs:
            side = self.info.get_hf_config().vision_config.image_size
            check_pixel_size(outputs["pixel_values"], side, side)
        return outputs

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {
            "pixel_values": MultiModalFieldConfig.batched("image"),
            "image_embeds": MultiModalFieldConfig.batched("image"),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        image_token_id = self.info.get_hf_config().image_token_id
        images = mm_items.get_items("image", (ImageEmbeddingItems, ImageProcessorItems))

        def get_replacement(item_idx: int) -> list[int]:
            if isinstance(images, ImageEmbeddingItems):
                return [image_token_id] * images.get_feature_size(item_idx)
            return [image_token_id] * self.info.num_image_tokens

        return [PromptReplacement("image", [image_token_id], get_replacement)]


class LlavaFactories(ProcessorFactories):
    """By the checkpoint's tower: Pixtral's images have rows of their own size, and marks."""

    def build_processor(
        self, ctx: InputProcessingContext, *, cache: ProcessorCache | None = None
    ) -> BaseMultiModalProcessor[Any]:
        if has_pixtral_tower(ctx.get_hf_config()):
            return pixtral.FACTORIES.build_processor(ctx, cache=cache)
        return super().build_processor(ctx, cache=cache)


FACTORIES = LlavaFactories(
    info=LlavaProcessingInfo,
    dummy_inputs=LlavaDummyInputsBuilder,
    processor=LlavaMultiModalProcessor,
)
