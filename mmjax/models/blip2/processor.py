"""BLIP-2's processor: the placeholder of the Q-Former's queries precedes the prompt with `</s>`.

Before: `</s> what is it`. After: `<image>*32 </s> what is it`; all of them take embeddings.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import BatchFeature

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.blip2.host_inputs import check_language_model
from mmjax.models.registry import ProcessorFactories
from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.dummy_inputs import ImageDummyInputsBuilder
from mmjax.processing.image_processors.affine import keep_bytes
from mmjax.processing.image_processors.image import check_pixel_size
from mmjax.processing.items.parse import (
    ImageEmbeddingItems,
    ImageEmbedsDataParser,
    ImageProcessorItems,
    ImageSize,
    MultiModalDataItems,
)
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.prompt_updates.updates import (
    PromptIndexTargets,
    PromptInsertion,
    PromptUpdate,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.tensors.inputs import MultiModalKwargsItems

IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- 'Question: ' + message.content + ' ' -}}
    {%- elif message.role == 'assistant' -%}
        {{- 'Answer: ' + message.content + ' ' -}}
    {%- else -%}
        {{- message.content + ' ' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'Answer:' -}}
{%- endif -%}
"""
"""The form in which the paper asks about an image, and asks again."""


class Blip2ProcessingInfo(BaseProcessingInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImageEmbedsDataParser

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1}

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Require one row for each query."""
        num_queries = self.get_hf_config().num_query_tokens
        if num_embeds != num_queries:
            raise RequestValueError(
                f"{modality} embeddings have {num_embeds} rows; an image has {num_queries}: give "
                "what the model's own Q-Former and projection give",
                param="multi_modal_data",
            )

    def get_reserved_tokens(self) -> Mapping[str, int]:
        return {IMAGE_TOKEN: self.get_image_token_id()}

    def load_hf_processor(self) -> Any:
        """Assemble the HF processor: AutoProcessor needs torchvision."""
        # Imported here: they import torch if it is installed.
        from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
        from transformers.models.blip_2.processing_blip_2 import Blip2Processor

        path = self.ctx.model_config.path
        hf_config = self.get_hf_config()
        check_language_model(hf_config)
        settings, _ = Blip2Processor.get_processor_dict(path)
        num_query_tokens = hf_config.num_query_tokens
        if settings.get("num_query_tokens") not in (None, num_query_tokens):
            raise CheckpointError(
                f"`num_query_tokens` of processor_config.json is {settings['num_query_tokens']}, "
                f"but config.json has {num_query_tokens}; make them equal"
            )
        # It adds `<image>` to tokenizers of older checkpoints, which lack it.
        processor = Blip2Processor(
            image_processor=keep_bytes(BlipImageProcessorPil).from_pretrained(path),
            tokenizer=self.get_tokenizer(),
            num_query_tokens=num_query_tokens,
        )
        image_token_id = self.get_tokenizer().convert_tokens_to_ids(IMAGE_TOKEN)
        if hf_config.image_token_index not in (None, image_token_id):
            raise CheckpointError(
                f"`{IMAGE_TOKEN}` is token {image_token_id}, but `image_token_index` of "
                f"config.json is {hf_config.image_token_index}"
            )
        return processor

    def get_image_token_id(self) -> int:
        return self.get_hf_processor().tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        return {"image": self.get_hf_config().num_query_tokens}


class Blip2DummyInputsBuilder(ImageDummyInputsBuilder[Blip2ProcessingInfo]):
    def get_largest_image(self) -> ImageSize:
        side = self.info.get_hf_config().vision_config.image_size
        return ImageSize(width=side, height=side)


class Blip2MultiModalProcessor(BaseMultiModalProcessor[Blip2ProcessingInfo]):
    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
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
        image_token_id = self.info.get_image_token_id()
        images = mm_items.get_items("image", (ImageEmbeddingItems, ImageProcessorItems))

        def get_insertion(item_idx: int) -> list[int]:
            if isinstance(images, ImageEmbeddingItems):
                return [image_token_id] * images.get_feature_size(item_idx)
            return [image_token_id] * self.info.get_hf_config().num_query_tokens

        return [PromptInsertion("image", PromptIndexTargets.start(), get_insertion)]


FACTORIES = ProcessorFactories(
    info=Blip2ProcessingInfo,
    dummy_inputs=Blip2DummyInputsBuilder,
    processor=Blip2MultiModalProcessor,
)
