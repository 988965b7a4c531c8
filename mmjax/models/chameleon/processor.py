"""Chameleon's processor: `<image>` is repeated between two tokens; a separator ends the prompt.

Before: `look <image> please`. After: `look <racm3:break> <image>*1024 <eoss> please <sep>`; only
the `<image>` take embeddings. `return_for_text_completion=True` omits the separator.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import BatchFeature

from mmjax.errors import CheckpointError
from mmjax.models.chameleon.host_inputs import count_codes
from mmjax.models.registry import ProcessorFactories
from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.dummy_inputs import ImageDummyInputsBuilder
from mmjax.processing.image_processors.affine import keep_bytes
from mmjax.processing.image_processors.image import check_pixel_size, check_resized_pixels
from mmjax.processing.items.parse import ImageSize, ImagesOnlyDataParser, MultiModalDataItems
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.prompt_updates.updates import (
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.tensors.inputs import MultiModalKwargsItems

CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {{- message.content + ('' if loop.last else sep_token) -}}
{%- endfor -%}
"""
"""Turns have no names: the separator ends each of them; the processor adds the last."""


class ChameleonProcessingInfo(BaseProcessingInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImagesOnlyDataParser

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return "<image>" if modality == "image" else None

    def get_num_image_tokens(self) -> int:
        """Return the number of VQ-VAE codes of an image."""
        return count_codes(self.get_hf_config().vq_config)

    def load_hf_processor(self) -> Any:
        """Assemble the HF processor: AutoProcessor needs torchvision."""
        # Imported here: they import torch if it is installed.
        from transformers.models.chameleon.image_processing_pil_chameleon import (
            ChameleonImageProcessorPil,
        )
        from transformers.models.chameleon.processing_chameleon import ChameleonProcessor

        path = self.ctx.model_config.path
        settings, _ = ChameleonProcessor.get_processor_dict(path)
        num_image_tokens = self.get_num_image_tokens()
        if settings.get("image_seq_length") not in (None, num_image_tokens):
            raise CheckpointError(
                f"`image_seq_length` of processor_config.json is {settings['image_seq_length']}, "
                f"but `vq_config` of config.json gives {num_image_tokens}; make them equal"
            )
        processor = ChameleonProcessor(
            image_processor=keep_bytes(ChameleonImageProcessorPil).from_pretrained(path),
            tokenizer=self.get_tokenizer(),
            image_seq_length=num_image_tokens,
            image_token=settings.get("image_token", "<image>"),
        )
        if self.get_tokenizer().sep_token_id is None:
            raise CheckpointError(
                "the tokenizer has no `sep_token`, which ends Chameleon's prompts; "
                "name it in tokenizer_config.json"
            )
        image_token_id = self.get_hf_config().image_token_id
        if image_token_id not in (None, processor.image_token_id):
            raise CheckpointError(
                f"`{processor.image_token}` is token {processor.image_token_id}, but "
                f"`image_token_id` of config.json is {image_token_id}"
            )
        return processor

    def is_for_completion(self, mm_kwargs: Mapping[str, object]) -> bool:
        """Return whether the model should continue the prompt's text, rather than answer it."""
        name = "return_for_text_completion"
        kwargs = self.ctx.merge_mm_kwargs(mm_kwargs)
        return bool(kwargs.get(name, kwargs.get("text_kwargs", {}).get(name, False)))

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        return {"image": self.get_num_image_tokens()}


class ChameleonDummyInputsBuilder(ImageDummyInputsBuilder[ChameleonProcessingInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return self.info.get_hf_processor().image_token * mm_counts.get("image", 0)

    def get_largest_image(self) -> ImageSize:
        side = self.info.get_hf_config().vq_config.resolution
        return ImageSize(width=side, height=side)


class ChameleonMultiModalProcessor(BaseMultiModalProcessor[ChameleonProcessingInfo]):
    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        check_resized_pixels(
            mm_data.get("images", ()),
            self.info.get_hf_processor().image_processor.size.shortest_edge,
            self.info.ctx.get_mm_config().max_image_pixels,
        )
        # The separator is added here, for text and token ids.
        without_sep = {**mm_kwargs, "return_for_text_completion": True}
        outputs = super()._call_hf_processor(prompt, mm_data, without_sep, tok_kwargs)
        if "pixel_values" in outputs:
            side = self.info.get_hf_config().vq_config.resolution
            check_pixel_size(outputs["pixel_values"], side, side)
        return outputs

    def _tokenize(
        self,
        prompt: str | list[int],
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> list[int]:
        """End every prompt with the separator, of text and of token ids alike."""
        token_ids = super()._tokenize(prompt, hf_processor_mm_kwargs, tokenization_kwargs)
        sep_token_id = self.info.get_tokenizer().sep_token_id
        is_for_completion = self.info.is_for_completion(hf_processor_mm_kwargs)
        if token_ids[-1:] == [sep_token_id] or is_for_completion:
            return token_ids
        return [*token_ids, sep_token_id]

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
        framed = [
            processor.image_start_token_id,
            *[processor.image_token_id] * processor.image_seq_length,
            processor.image_end_token_id,
        ]
        content = PromptUpdateDetails.select_token_id(framed, processor.image_token_id)
        return [PromptReplacement("image", [processor.image_token_id], content)]


FACTORIES = ProcessorFactories(
    info=ChameleonProcessingInfo,
    dummy_inputs=ChameleonDummyInputsBuilder,
    processor=ChameleonMultiModalProcessor,
)
