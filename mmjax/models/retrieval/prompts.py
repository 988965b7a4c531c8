"""Prompts of models that give a vector for each token (ColPali, arXiv 2407.01449).

A prompt is one picture, around which the model has a text of its own, or a text that looks for
pictures, with a prefix and with tokens behind it whose vectors are free of any word.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.family import FamilyInfo, FamilyProcessor

CHAT_TEMPLATE = r"""
{%- for message in messages -%}
    {%- for part in message.content -%}
        {{- 'IMAGE' if part.type == 'image' else part.text -}}
    {%- endfor -%}
{%- endfor -%}
"""
NUM_FREE_TOKENS = 10
"""Padding behind a text (HF: `query_augmentation_token`)."""


class RetrievalInfo(FamilyInfo):
    """What such a row has in place of what the row has that it is based on."""

    limits: ClassVar = {"image": 1}
    tasks: ClassVar[Mapping[str, str]] = {}
    answer_form = None
    is_chat_template_fixed = True
    query_prefix: ClassVar[str]
    """Of a checkpoint whose processor_config.json does not say it."""
    visual_prompt: ClassVar[str]
    """Likewise; with `<image>` where the picture stands."""

    def write_visual_prompt(self) -> str:
        """Return the text around a picture."""
        return self.processor_settings.get("visual_prompt_prefix") or self.visual_prompt

    def write_query(self, text: str) -> str:
        """Return a text that looks for pictures, with what stands around it."""
        pad = self.get_tokenizer().pad_token
        if pad is None:
            raise CheckpointError(
                "the tokenizer has no padding token, which this model's queries end with; name it "
                "in tokenizer_config.json"
            )
        prefix = self.processor_settings.get("query_prefix") or self.query_prefix
        return f"{prefix}{text}{pad * NUM_FREE_TOKENS}\n"

    def get_counted_placeholder(self, modality: str) -> str | None:
        """Return None: a picture's prompt need not be written."""
        return None

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a whole prompt."""
        return list(self.get_tokenizer().encode(text, add_special_tokens=False))

    @cached_property
    def visual_ids(self) -> list[int]:
        """The prompt of a picture, before its embeddings have places."""
        return self.tokenize(self.write_visual_prompt())

    def frame_prompt(
        self, token_ids: list[int], mm_counts: Mapping[str, int], mm_kwargs: Mapping[str, object]
    ) -> list[int]:
        """Return a picture's prompt; a text has all around it already, and ids stay as they are."""
        if mm_counts.get("image"):
            if token_ids and token_ids != self.visual_ids:
                raise RequestValueError(
                    "the prompt has a picture and a text; this model compares the one with the "
                    "other, and takes each by itself",
                    param="prompt",
                )
            return list(self.visual_ids)
        if token_ids == self.visual_ids:
            raise RequestValueError(
                "the prompt is that of a picture, and none came with it", param="prompt"
            )
        return token_ids or self.tokenize(self.write_query(""))


class RetrievalProcessor(FamilyProcessor[RetrievalInfo]):
    """Tokenizes texts as queries."""

    def _tokenize_text(
        self,
        prompt: str,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> list[int]:
        if not prompt:
            return []  # what it is about, the media say
        info = self.info
        own = (info.find_placeholder_str("image", 1), info.write_visual_prompt())
        is_visual = prompt.strip() in own
        return info.visual_ids if is_visual else info.tokenize(info.write_query(prompt))

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        """Return them; that it is overridden says that texts of a chat stay texts."""
        return prompt_tokens


def write_chat_template(placeholder: str) -> str:
    """Return the template whose prompts are a picture's placeholder, or a text."""
    return CHAT_TEMPLATE.replace("IMAGE", placeholder)
