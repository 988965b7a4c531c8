"""A request between its steps: what HF gave, and what `commit` is to bring to the cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class ProcessorCache(Protocol):
    """What a processor asks of a cache of processed items."""

    def peek_prompt_updates(self, mm_hash: str) -> Sequence[ResolvedPromptUpdate] | None:
        """Return a held item's prompt updates, else None; changes neither order nor statistics."""
        ...

    def get_and_update(
        self, mm_items: Sequence[ProcessedItem | None], mm_hashes: Sequence[str]
    ) -> Sequence[tuple[ItemData | None, Sequence[ResolvedPromptUpdate]]]:
        """Look up and store one request's items, as one change that no other thread comes between.

        An item that is sent is None where the engine's side holds its tensors. Raises
        MultiModalCacheMissError, before any change, for hashes that are neither held nor given.
        """
        ...


class ItemStore(Protocol):
    """What a processor asks of a store on disk, which outlives it."""

    def load(self, key: bytes) -> MultiModalKwargsItem | None:
        """Return an item's tensors; None if it is not there."""
        ...

    def save(self, key: bytes, item: MultiModalKwargsItem) -> None:
        """Keep an item's tensors, which must not change."""
        ...


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
        return MultiModalInputs(
            prompt_token_ids=self.prompt_token_ids,
            encoder_prompt_token_ids=self.encoder_prompt_token_ids,
            mm_kwargs=MultiModalKwargsItems(
                {
                    modality: [items[modality, index] for index in range(len(hashes))]
                    for modality, hashes in self.mm_hashes.items()
                }
            ),
            mm_hashes=self.mm_hashes,
            mm_placeholders=self.mm_placeholders,
            prompt=self.prompt,
        )
