"""Chameleon's processor: `<image>` is repeated between two tokens; a separator ends the prompt.

Before: `look <image> please`. After: `look <racm3:break> <image>*1024 <eoss> please <sep>`; only
the `<image>` take embeddings. `return_for_text_completion=True` omits the separator.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import BatchFeature

from mmjax.errors import CheckpointError
from mmjax.models.chameleon.host_inputs import ChameleonHostInputs
from mmjax.models.family import FamilyInfo, FamilyProcessor, check_settings, make_factories
from mmjax.processing.image_processors.affine import keep_bytes
from mmjax.processing.image_processors.image import check_resized_pixels
from mmjax.processing.items.parse import ImagesOnlyDataParser

CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {{- message.content + ('' if loop.last else sep_token) -}}
{%- endfor -%}
"""
"""Turns have no names: the separator ends each of them; the processor adds the last."""


class ChameleonProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImagesOnlyDataParser
    host_inputs = ChameleonHostInputs
    placeholders: ClassVar = {"image": "<image>"}
    hf_updates_prompt = True

    def load_hf_processor(self) -> Any:
        """Assemble the HF processor: AutoProcessor needs torchvision."""
        # Imported here: they import torch if it is installed.
        from transformers.models.chameleon.image_processing_pil_chameleon import (
            ChameleonImageProcessorPil,
        )
        from transformers.models.chameleon.processing_chameleon import ChameleonProcessor

        path = self.ctx.model_config.path
        settings, _ = ChameleonProcessor.get_processor_dict(path)
        facts = {"image_seq_length": self.num_unit_tokens}
        check_settings(settings, facts, source="`vq_config` of config.json gives")
        processor = ChameleonProcessor(
            image_processor=keep_bytes(ChameleonImageProcessorPil).from_pretrained(path),
            tokenizer=self.get_tokenizer(),
            image_token=settings.get("image_token", "<image>"),
            **facts,
        )
        if self.get_tokenizer().sep_token_id is None:
            raise CheckpointError(
                "the tokenizer has no `sep_token`, which ends Chameleon's prompts; "
                "name it in tokenizer_config.json"
            )
        self.check_token(processor.image_token)
        return processor

    def is_for_completion(self, mm_kwargs: Mapping[str, object]) -> bool:
        """Return whether the model should continue the prompt's text, rather than answer it."""
        name = "return_for_text_completion"
        kwargs = self.ctx.merge_mm_kwargs(mm_kwargs)
        return bool(kwargs.get(name, kwargs.get("text_kwargs", {}).get(name, False)))

    def check_sizes(self, mm_data: Mapping[str, Any], mm_kwargs: Mapping[str, object]) -> None:
        """Refuse also what HF would scale to a bomb."""
        edge = self.get_image_processor().size.shortest_edge
        max_pixels = self.ctx.get_mm_config().max_image_pixels
        check_resized_pixels(mm_data.get("images", ()), edge, max_pixels)
        super().check_sizes(mm_data, mm_kwargs)

    def get_embed_token_id(self, modality: str) -> int:
        return self.get_hf_processor().image_token_id

    def write_item(self, modality: str, size: int) -> list[int]:
        processor = self.get_hf_processor()
        codes = super().write_item(modality, size)
        return [processor.image_start_token_id, *codes, processor.image_end_token_id]


class ChameleonMultiModalProcessor(FamilyProcessor[ChameleonProcessingInfo]):
    only_tokenizes_text = False

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        # The separator is added below, for text and token ids.
        without_sep = {**mm_kwargs, "return_for_text_completion": True}
        return super()._call_hf_processor(prompt, mm_data, without_sep, tok_kwargs)

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


FACTORIES = make_factories(ChameleonProcessingInfo, ChameleonMultiModalProcessor)
