"""A request between its two steps: what `prepare` made, for `commit` to bring to the cache.

Knows no cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmjax.processing.items.parse import MultiModalDataItems
from mmjax.processing.prompt_updates.updates import ResolvedPromptUpdate
from mmjax.processing.tensors.inputs import MultiModalKwargsItem, PlaceholderRange

ProcessedItem = tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]]
"""An item's tensors, and the alternatives of its prompt update."""


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
