"""Florence-2's processor: the encoder prompt is the image's tokens and a task in words.

Before: `<CAPTION>` and an image. After, for the encoder: `<image>*577 <s> What does the image
describe? </s>`, where the first 577 take embeddings; for the decoder: `</s>`. Without an image
the encoder prompt is the task only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import BatchFeature

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.registry import ProcessorFactories
from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.dummy_inputs import ImageDummyInputsBuilder
from mmjax.processing.encdec import EncDecMultiModalProcessor
from mmjax.processing.image_processors.image import check_pixel_size
from mmjax.processing.items.parse import ImageSize, MultiModalDataItems, MultiModalDataParser
from mmjax.processing.prompt_updates.updates import (
    PromptIndexTargets,
    PromptInsertion,
    PromptUpdate,
    as_ids,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.tensors.inputs import MultiModalKwargsItems

CHAT_TEMPLATE = r"""
{%- for message in messages if message.role == 'user' -%}
    {%- if loop.last -%}
        {{- message.content -}}
    {%- endif -%}
{%- endfor -%}
"""
"""The task of the last turn alone: the model was trained on tasks, not on conversations."""


class Florence2DataParser(MultiModalDataParser):
    @staticmethod
    def is_embeddings(data: object) -> bool:
        """Refuse embeddings: the encoder prompt has positions for whole images only."""
        if MultiModalDataParser.is_embeddings(data):
            raise RequestValueError(
                "Florence-2 takes images, not their embeddings; give the image",
                param="multi_modal_data",
            )
        return False


class Florence2ProcessingInfo(BaseProcessingInfo):
    chat_template = CHAT_TEMPLATE

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1}

    def get_reserved_tokens(self) -> Mapping[str, int]:
        processor = self.get_hf_processor()
        return {processor.image_token: processor.image_token_id}

    def get_data_parser(self) -> MultiModalDataParser:
        return Florence2DataParser(limits=self.get_media_limits())

    def load_hf_processor(self) -> Any:
        """Assemble the HF processor: AutoProcessor needs torchvision."""
        # Imported here: they import torch if it is installed.
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.florence2.processing_florence2 import Florence2Processor

        path, hf_config = self.ctx.model_config.path, self.get_hf_config()
        settings, _ = Florence2Processor.get_processor_dict(path)
        image_processor = CLIPImageProcessorPil.from_pretrained(path)
        if not getattr(image_processor, "image_seq_length", None):
            raise CheckpointError(
                "the image processor's configuration has no `image_seq_length`: the number of "
                "embeddings of an image (577 for the published models)"
            )
        processor = Florence2Processor(
            image_processor=image_processor,
            tokenizer=self.get_tokenizer(),
            num_additional_image_tokens=settings.get("num_additional_image_tokens", 0),
            post_processor_config=settings.get("post_processor_config"),
        )
        if processor.image_token_id != hf_config.image_token_id:
            raise CheckpointError(
                f"`{processor.image_token}` is token {processor.image_token_id}, but "
                f"`image_token_id` of config.json is {hf_config.image_token_id}"
            )
        return processor

    def get_pixel_size(self) -> tuple[int, int]:
        """Return the (height, width) that images are resized to."""
        image_processor = self.get_hf_processor().image_processor
        crops = image_processor.do_center_crop
        size = image_processor.crop_size if crops else image_processor.size
        return size.height, size.width

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        return {"image": self.get_hf_processor().num_image_tokens}

    def write_task(self, prompt: str) -> str:
        """Replace a task such as `<OD>` by its sentence; other text is unchanged."""
        try:
            (sentence,) = self.get_hf_processor()._construct_prompts([prompt])
        except ValueError as error:
            raise RequestValueError(
                "prompt has a task token (as `<OD>`) among other words; send the task alone",
                param="prompt",
            ) from error
        return sentence


class Florence2DummyInputsBuilder(ImageDummyInputsBuilder[Florence2ProcessingInfo]):
    def get_largest_image(self) -> ImageSize:
        height, width = self.info.get_pixel_size()
        return ImageSize(width=width, height=height)


class Florence2MultiModalProcessor(EncDecMultiModalProcessor[Florence2ProcessingInfo]):
    def create_encoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> list[int]:
        """Replace the task by its sentence, with `<s>` and `</s>` only if there is an image."""
        tokenizer = self.info.get_tokenizer()
        if isinstance(prompt, str):
            token_ids = as_ids(self.info.write_task(prompt), tokenizer)
        else:
            token_ids = self._write_task_in_tokens(prompt)
        if not mm_items.get_count("image", strict=False):
            return token_ids
        return [tokenizer.bos_token_id, *token_ids, tokenizer.eos_token_id]

    def create_decoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> list[int]:
        return [self.info.get_hf_config().get_text_config().eos_token_id]

    def _write_task_in_tokens(self, prompt_tokens: list[int]) -> list[int]:
        """Replace the task by its sentence, without the tokenizer's `<s>` and `</s>`."""
        tokenizer = self.info.get_tokenizer()
        start = int(prompt_tokens[:1] == [tokenizer.bos_token_id])
        stop = len(prompt_tokens) - int(prompt_tokens[start:][-1:] == [tokenizer.eos_token_id])
        token_ids = prompt_tokens[start:stop]
        text = tokenizer.decode(token_ids)
        sentence = self.info.write_task(text)
        return token_ids if sentence == text else as_ids(sentence, tokenizer)

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        outputs = super()._call_hf_processor(prompt, mm_data, mm_kwargs, tok_kwargs)
        if "pixel_values" in outputs:
            check_pixel_size(outputs["pixel_values"], *self.info.get_pixel_size())
        return outputs

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {"pixel_values": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        processor = self.info.get_hf_processor()
        image_tokens = [processor.image_token_id] * processor.num_image_tokens
        return [PromptInsertion("image", PromptIndexTargets.start(), image_tokens)]


FACTORIES = ProcessorFactories(
    info=Florence2ProcessingInfo,
    dummy_inputs=Florence2DummyInputsBuilder,
    processor=Florence2MultiModalProcessor,
)
