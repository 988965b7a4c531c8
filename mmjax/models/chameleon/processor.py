"""Chameleon's processor: `<image>` is repeated between two tokens; a separator ends the prompt.

Before: `look <image> please`. After: `look <racm3:break> <image>*1024 <eoss> please <sep>`; only
the `<image>` take embeddings. `return_for_text_completion=True` omits the separator.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from mmjax.errors import CheckpointError
from mmjax.models.chameleon.host_inputs import ChameleonHostInputs
from mmjax.models.family import FamilyInfo, FamilyProcessor, check_settings, make_factories
from mmjax.processing.image_processors.image import check_resized_pixels
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.image_processors.pil_classes import find_pil_class
from mmjax.processing.items.parse import ImagesOnlyDataParser

CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {{- message.content + ('' if loop.last else sep_token) -}}
{%- endfor -%}
"""
"""Turns have no names: the separator ends each of them; the processor adds the last."""
_COMPLETES = "return_for_text_completion"
"""HF's name of a kwarg: whether the separator is left out."""


class ChameleonProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImagesOnlyDataParser
    host_inputs = ChameleonHostInputs
    placeholders: ClassVar = {"image": "<image>"}

    def load_hf_processor(self) -> ProcessorOfParts:
        facts = {"image_seq_length": self.num_unit_tokens}
        check_settings(self.processor_settings, facts, source="`vq_config` of config.json gives")
        if self.get_tokenizer().sep_token_id is None:
            raise CheckpointError(
                "the tokenizer has no `sep_token`, which ends Chameleon's prompts; "
                "name it in tokenizer_config.json"
            )
        self.check_token(self.find_token("image_token", "<image>"))
        chameleon = find_pil_class("Chameleon", "chameleon")
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=chameleon.from_pretrained(self.ctx.model_config.path),
            text_settings=frozenset({_COMPLETES}),
        )

    def is_for_completion(self, mm_kwargs: Mapping[str, object]) -> bool:
        """Return whether the model should continue the prompt's text, rather than answer it."""
        return bool(self.scope_kwargs(mm_kwargs, "text_kwargs").get(_COMPLETES, False))

    def check_sizes(self, mm_data: Mapping[str, Any], mm_kwargs: Mapping[str, object]) -> None:
        """Refuse also what HF would scale to a bomb."""
        edge = self.get_image_processor().size.shortest_edge
        max_pixels = self.ctx.get_mm_config().max_image_pixels
        check_resized_pixels(mm_data.get("images", ()), edge, max_pixels)
        super().check_sizes(mm_data, mm_kwargs)

    def get_embed_token_id(self, modality: str) -> int:
        return self.get_token_id(self.find_token("image_token", "<image>"))

    def write_item(self, modality: str, size: int) -> list[int]:
        names = (("boi_token", "<racm3:break>"), ("eoi_token", "<eoss>"))
        start, end = (self.get_token_id(self.find_token(*name)) for name in names)
        return [start, *super().write_item(modality, size), end]


class ChameleonMultiModalProcessor(FamilyProcessor[ChameleonProcessingInfo]):
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
