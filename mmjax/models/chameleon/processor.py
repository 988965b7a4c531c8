"""Chameleon's processor: `<image>` is repeated between two tokens; a separator ends the prompt.

Before: `look <image> please`. After: `look <racm3:break> <image>*1024 <eoss> please <sep>`; only
the `<image>` take embeddings. `return_for_text_completion=True` omits the separator.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from mmjax.errors import CheckpointError, check_settings
from mmjax.models.chameleon.host_inputs import ChameleonHostInputs
from mmjax.models.family import FamilyInfo, make_factories
from mmjax.processing.image_processors.image import check_resized_pixels
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
    image_processors: ClassVar = {"Chameleon": "chameleon"}
    placeholders: ClassVar = {"image": "<image>"}

    def load_hf_processor(self) -> Any:
        facts = {"image_seq_length": self.num_unit_tokens}
        check_settings(self.processor_settings, facts, source="`vq_config` of config.json gives")
        if self.get_tokenizer().sep_token_id is None:
            raise CheckpointError(
                "the tokenizer has no `sep_token`, which ends Chameleon's prompts; "
                "name it in tokenizer_config.json"
            )
        self.check_token(self.find_token("image_token", "<image>"))
        return replace(super().load_hf_processor(), text_settings=frozenset({_COMPLETES}))

    def frame_prompt(
        self, token_ids: list[int], mm_counts: Mapping[str, int], mm_kwargs: Mapping[str, object]
    ) -> list[int]:
        """End a prompt with the separator, but one whose text the model is to continue."""
        separator = self.get_tokenizer().sep_token_id
        is_for_completion = self.scope_kwargs(mm_kwargs, "text_kwargs").get(_COMPLETES, False)
        if is_for_completion or token_ids[-1:] == [separator]:
            return token_ids
        return [*token_ids, separator]

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


FACTORIES = make_factories(ChameleonProcessingInfo)
