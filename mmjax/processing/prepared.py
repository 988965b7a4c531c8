"""A request between its steps: what HF gave, and what `commit` is to bring to the cache.

Knows no cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mmjax.processing.items.items import MultiModalDataItems
from mmjax.processing.prompt_updates.updates import (
    MultiModalPromptUpdates,
    ResolvedPromptUpdate,
)
from mmjax.processing.tensors.inputs import (
    ItemData,
    MultiModalInputs,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from mmjax.processing.tensors.shared_item import SharedItem

ProcessedItem = tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]]
"""An item's tensors, and the alternatives of its prompt update."""


AnswerParser = Callable[[Sequence[int]], Mapping[str, Any]]
"""Returns what an answer's token ids say beside their text, as boxes: JSON values."""


class ProcessedPrompt(NamedTuple):
    """A tokenized prompt, with what its items do to it."""

    token_ids: list[int]
    prompt_updates: MultiModalPromptUpdates
    fresh: Mapping[str, ProcessedItem]
    """By hash, the items that were processed for this request."""
    may_be_updated: bool
    """Whether the HF processor may have updated the prompt itself."""
    was_beside_media: bool
    """Whether it was given text and media together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedInputs:
    """A prompt with its placeholders, and the items that no cache had."""

    prompt: str | None
    """The prompt as text, where it came as text."""
    prompt_token_ids: list[int]
    """With every placeholder in place (an encoder-decoder model's: those of its decoder)."""
    mm_hashes: Mapping[str, list[str]]
    """Per modality, one hash per item, in the user's order."""
    mm_placeholders: Mapping[str, list[PlaceholderRange]]
    """Per modality, one range per item, in the user's order."""
    fresh: Mapping[str, ProcessedItem]
    """By hash, the items that were processed for this request."""
    mm_items: MultiModalDataItems
    """As they came, for `rebuild`."""
    mm_kwargs: Mapping[str, object]
    """The request's own, for `rebuild`."""
    encoder_prompt_token_ids: list[int] | None = None
    """The encoder's prompt, where the placeholders stand; None for a decoder alone."""
    parse_answer: AnswerParser | None = None
    """None: an answer is text, and nothing more."""

    def with_decoder_prompt(
        self, prompt: str | list[int], token_ids: Sequence[int]
    ) -> "PreparedInputs":
        """Return the same where this prompt is the encoder's alone, and `token_ids` the decoder's.

        `prompt` is what the caller gave for both.
        """
        return replace(
            self,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(token_ids),
            encoder_prompt_token_ids=self.prompt_token_ids,
        )

    def to_inputs(
        self, items: Mapping[tuple[str, int], ItemData | None] | None = None
    ) -> MultiModalInputs:
        """Return what the engine gets, with each item by (modality, index); None: all are fresh."""
        if items is None:
            items = {
                (modality, index): self.fresh[mm_hash][0]
                for modality, hashes in self.mm_hashes.items()
                for index, mm_hash in enumerate(hashes)
            }
        tensors = {place: item for place, item in items.items() if not isinstance(item, SharedItem)}
        return MultiModalInputs(
            prompt_token_ids=self.prompt_token_ids,
            encoder_prompt_token_ids=self.encoder_prompt_token_ids,
            mm_kwargs=MultiModalKwargsItems(
                {
                    modality: [tensors.get((modality, index)) for index in range(len(hashes))]
                    for modality, hashes in self.mm_hashes.items()
                }
            ),
            shared_items={
                place: item for place, item in items.items() if isinstance(item, SharedItem)
            },
            mm_hashes=self.mm_hashes,
            mm_placeholders=self.mm_placeholders,
            prompt=self.prompt,
        )
