r"""PaliGemma's processor: the images, BOS, the text and a newline are a prompt.

Before: `<image>detect car`. After: `<image>*256 <bos> detect car \n`; the first 256 take
embeddings.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import check_settings
from mmjax.models.family import FamilyInfo, make_factories
from mmjax.models.host_inputs import UnitHostInputs
from mmjax.models.retrieval.prompts import RetrievalInfo, RetrievalProcessor, write_chat_template
from mmjax.processing.answers import PALIGEMMA
from mmjax.processing.chat_turns import write_parts
from mmjax.processing.prompt_updates.updates import as_ids

IMAGE_TOKEN = "<image>"
CHAT_TEMPLATE = (
    "{%- for part in messages | sum(attribute='content', start=[]) if part.type == 'image' -%}"
    "{{- '<image>' -}}{%- endfor -%}"
    "{%- for message in (messages | selectattr('role', 'equalto', 'user') | list)[-1:] -%}"
    f"{write_parts(image='')}{{%- endfor -%}}"
)
"""The task of the last turn alone: the model was trained on tasks, not on conversations."""


class PaliGemmaProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = {
        "Caption": "caption en",
        "Describe": "describe en",
        "Answer": "answer en {how many boats are there?}",
        "Read text": "ocr",
        "Detect": "detect {car}",
        "Segment": "segment {car}",
    }
    host_inputs = UnitHostInputs
    image_processors: ClassVar = {"Siglip": "siglip"}
    placeholders: ClassVar = {"image": IMAGE_TOKEN}
    adds_special_tokens = False
    answer_form = PALIGEMMA

    def load_hf_processor(self) -> Any:
        processor = super().load_hf_processor()
        name = "image_seq_length"
        own = {name: getattr(processor.image_processor, name, None)}
        expected = {name: self.num_unit_tokens}
        check_settings(own, expected, source="config.json gives an image")
        self.check_token(IMAGE_TOKEN)
        self.find_bos()
        return processor

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Require one row for each patch."""
        most = self.num_unit_tokens
        hint = f"{most}: give what the model's own tower and projector give"
        self.check_rows(modality, num_embeds, [most], hint)

    def frame_text(self, text: str) -> str:
        """Write BOS and the newline, which may merge with the text, as HF's processor."""
        before, image, words = text.rpartition(IMAGE_TOKEN)
        return f"{before}{image}{self.get_tokenizer().bos_token}{words}\n"

    def frame_prompt(
        self, token_ids: list[int], mm_counts: Mapping[str, int], mm_kwargs: Mapping[str, object]
    ) -> list[int]:
        """Put BOS behind the last image, and a newline at the end.

        A prompt with BOS there and a newline at its end is one already.
        """
        tokenizer, image = self.get_tokenizer(), self.get_embed_token_id("image")
        bos, end = self.find_bos(), tokenizer.decode(token_ids[-1:])
        start = len(token_ids) - token_ids[::-1].index(image) if image in token_ids else 0
        if token_ids[start : start + 1] == [bos] and end.endswith("\n"):
            return token_ids
        first = int(token_ids[:1] == [bos])
        # The newline becomes one token with those before it.
        own = end if end.strip("\n") == "" else ""
        text = token_ids[max(first, start) : len(token_ids) - bool(own)]
        return [*token_ids[first:start], bos, *text, *as_ids(f"{own}\n", tokenizer)]

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Tell HF's model that all tokens are the prompt's: else it sees what is past alone."""
        return {**tensors, "token_type_ids": np.zeros((1, len(token_ids)), np.int64)}


class ColPaliProcessingInfo(RetrievalInfo, PaliGemmaProcessingInfo):
    chat_template = write_chat_template(IMAGE_TOKEN)
    query_prefix = "Question: "
    visual_prompt = "Describe the image."

    def write_visual_prompt(self) -> str:
        return f"{IMAGE_TOKEN}{self.get_tokenizer().bos_token}{super().write_visual_prompt()}\n"

    def write_query(self, text: str) -> str:
        return f"{self.get_tokenizer().bos_token}{super().write_query(text)}"


FACTORIES = make_factories(PaliGemmaProcessingInfo)
COLPALI_FACTORIES = make_factories(ColPaliProcessingInfo, RetrievalProcessor)
