"""The items of a request -> their tensors and prompt updates, each from the cache or from HF.

`BaseMultiModalProcessor` stands on it; families override what `ProcessorHooks` names.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import BatchFeature

from mmjax.errors import MediaIdConflictError, RequestValueError
from mmjax.processing.commit import ProcessorCache
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder
from mmjax.processing.hooks import InfoT, ProcessorHooks
from mmjax.processing.inputs import MultiModalKwargsItems
from mmjax.processing.parse import ModalityDataItems, MultiModalDataItems
from mmjax.processing.prepared import ProcessedItem, ProcessorCall
from mmjax.processing.prompt_updates import MultiModalPromptUpdates, ResolvedPromptUpdate
from mmjax.processing.validation import validate_mm_kwargs, validate_mm_updates


class ProcessedPrompt(NamedTuple):
    """A tokenized prompt, with what its items do to it."""

    token_ids: list[int]
    prompt_updates: MultiModalPromptUpdates
    fresh: Mapping[str, ProcessedItem]
    is_update_applied: bool
    """Whether the HF processor has updated the prompt itself."""


class ItemProcessing(ProcessorHooks[InfoT]):
    """Asks the cache what it holds, and HF for the rest in one batch; changes no cache."""

    def __init__(
        self,
        info: InfoT,
        dummy_inputs: BaseDummyInputsBuilder[InfoT],
        *,
        cache: ProcessorCache | None = None,
    ) -> None:
        super().__init__(info, dummy_inputs)
        self.cache = cache

    def _cached_apply_hf_processor(
        self, prompt: str | list[int], call: ProcessorCall
    ) -> ProcessedPrompt:
        """Process what the cache lacks, in one batch; the rest have their updates there."""
        cache = self.cache
        if cache is None or any(items.get_passthrough_data() for items in call.mm_items.values()):
            return self._apply_hf_processor(prompt, call)
        known, missing = _look_up(cache, call.hashes)
        mm_missing = self._select(call.mm_items, missing)
        token_ids, hf_inputs, _ = self._apply_hf_processor_main(
            prompt, call._replace(mm_items=mm_missing), enable_hf_prompt_update=False
        )
        fresh = self._to_fresh(
            missing, self._split_into_items(mm_missing, hf_inputs, call.mm_kwargs)
        )
        known.update({mm_hash: alternatives for mm_hash, (_, alternatives) in fresh.items()})
        updates = {
            modality: [
                [self._recompute_cached_prompt_update(update, index) for update in known[mm_hash]]
                for index, mm_hash in enumerate(hashes)
            ]
            for modality, hashes in call.hashes.items()
        }
        return ProcessedPrompt(token_ids, updates, fresh, is_update_applied=False)

    def _to_fresh(
        self,
        rows: Mapping[str, Mapping[str, int]],
        processed: Mapping[str, Sequence[ProcessedItem]],
    ) -> dict[str, ProcessedItem]:
        """Return the processed items by hash; `rows` has them in the same order."""
        fresh: dict[str, ProcessedItem] = {}
        for modality, hashes in rows.items():
            for mm_hash, (item, alternatives) in zip(hashes, processed[modality], strict=True):
                _add_fresh(fresh, mm_hash, (item.own_arrays(), alternatives))
        return fresh

    def _select(
        self, mm_items: MultiModalDataItems, rows: Mapping[str, Mapping[str, int]]
    ) -> MultiModalDataItems:
        """Return the items at `rows` (per modality: hash -> index), all of which must have data."""
        for modality, indices in rows.items():
            _check_data(modality, mm_items[modality], indices.values())
        return MultiModalDataItems(
            {
                modality: mm_items[modality].select(list(indices.values()))
                for modality, indices in rows.items()
            }
        )

    def _apply_hf_processor(self, prompt: str | list[int], call: ProcessorCall) -> ProcessedPrompt:
        """Process all items, without asking a cache."""
        for modality, items in call.mm_items.items():
            _check_data(modality, items, range(len(items)))
        token_ids, hf_inputs, is_update_applied = self._apply_hf_processor_main(
            prompt, call, enable_hf_prompt_update=True
        )
        processed = self._split_into_items(call.mm_items, hf_inputs, call.mm_kwargs)
        fresh: dict[str, ProcessedItem] = {}
        for modality, items in processed.items():
            for mm_hash, (item, alternatives) in zip(call.hashes[modality], items, strict=True):
                kept = item if self.cache is None else item.own_arrays()
                _add_fresh(fresh, mm_hash, (kept, alternatives))
        updates = {
            modality: [alternatives for _, alternatives in items]
            for modality, items in processed.items()
        }
        return ProcessedPrompt(token_ids, updates, fresh, is_update_applied)

    def _split_into_items(
        self,
        mm_items: MultiModalDataItems,
        hf_inputs: Mapping[str, Any],
        mm_kwargs: Mapping[str, object],
    ) -> dict[str, list[ProcessedItem]]:
        """Divide the HF processor's batch, and resolve each item's prompt updates."""
        counts = {modality: n for modality, n in mm_items.get_all_counts().items() if n}
        if not counts:
            return {modality: [] for modality in mm_items}
        features = BatchFeature(dict(hf_inputs))
        kwargs = MultiModalKwargsItems.from_hf_inputs(
            features, self._get_mm_fields_config(features, mm_kwargs)
        )
        validate_mm_kwargs(kwargs, counts)
        unbound = self._get_prompt_updates(mm_items, mm_kwargs, kwargs)
        updates = self._bind_and_group_updates(unbound, counts)
        validate_mm_updates(updates, counts)
        return {
            modality: [
                (kwargs.get_item(modality, index), alternatives)
                for index, alternatives in enumerate(updates[modality])
            ]
            for modality in counts
        }


def _look_up(
    cache: ProcessorCache, hashes_by_modality: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Sequence[ResolvedPromptUpdate]], dict[str, dict[str, int]]]:
    """Return the held items' updates, and per modality the others: hash -> first index."""
    known: dict[str, Sequence[ResolvedPromptUpdate]] = {}
    missing: dict[str, dict[str, int]] = {}
    for modality, hashes in hashes_by_modality.items():
        for index, (mm_hash, is_held) in enumerate(
            zip(hashes, cache.is_cached(hashes), strict=True)
        ):
            updates = cache.peek_prompt_updates(mm_hash) if is_held else None
            if updates is None:
                missing.setdefault(modality, {}).setdefault(mm_hash, index)
            else:
                _check_alike(mm_hash, {update.modality for update in updates}, {modality})
                known[mm_hash] = updates
    return known, missing


def _add_fresh(fresh: dict[str, ProcessedItem], mm_hash: str, processed: ProcessedItem) -> None:
    """Keep the first item of a hash; all others must do the same to the prompt."""
    first = fresh.setdefault(mm_hash, processed)
    if first is not processed:
        ours, others = (
            [(u.modality, u.content.full) for u in one[1]] for one in (processed, first)
        )
        _check_alike(mm_hash, others, ours)


def _check_alike(mm_hash: str, first: object, other: object) -> None:
    if first != other:
        # Of one content they are alike: a caller's own id stands for two.
        raise MediaIdConflictError(
            f"the id `{mm_hash}` stands for two items that differ; give each an id of its own",
            param="multi_modal_uuids",
        )


def _check_data(modality: str, items: ModalityDataItems, indices: Iterable[int]) -> None:
    """Refuse items of which only a uuid was given."""
    for index in indices:
        if items.get_item_for_hash(index) is None:
            raise RequestValueError(
                f"Cache miss for {modality} at index {index} but data is not provided; "
                "send the data with its uuid again",
                param="multi_modal_data",
            )
