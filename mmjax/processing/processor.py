"""Prompt and media -> token ids with placeholders, and the items' tensors: the flow of every model.

A family subclasses `BaseMultiModalProcessor` and overrides `_get_mm_fields_config` and
`_get_prompt_updates`. Knows no cache but through `ProcessorCache`, and no engine.

A text prompt without a cache goes to the HF processor together with its media, which then updates
the prompt itself. With a cache, or with token ids, the media go alone (with dummy text, in one
batch of the items that the cache lacks), and the updates are applied here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from transformers import BatchFeature

from mmjax.errors import MultiModalCacheMissError, RequestValueError
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder
from mmjax.processing.hasher import MultiModalHasher
from mmjax.processing.hooks import InfoT, ProcessorCall, ProcessorHooks
from mmjax.processing.inputs import (
    MultiModalInputs,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from mmjax.processing.parse import (
    MultiModalDataDict,
    MultiModalDataItems,
    MultiModalUUIDDict,
    parse_mm_uuids,
    validate_mm_uuids,
)
from mmjax.processing.prompt_updates import (
    MultiModalPromptUpdates,
    PlaceholderFeaturesInfo,
    ResolvedPromptUpdate,
)
from mmjax.processing.validation import (
    validate_mm_kwargs,
    validate_mm_placeholders,
    validate_mm_updates,
    validate_placeholder_counts,
    validate_prompt,
    validate_reserved_tokens,
)

ProcessedItem = tuple[MultiModalKwargsItem, Sequence[ResolvedPromptUpdate]]
"""An item's tensors, and the alternatives of its prompt update."""


@runtime_checkable
class ProcessorCache(Protocol):
    """What a processor asks of a cache of processed items."""

    def is_cached(self, mm_hashes: Sequence[str]) -> list[bool]:
        """Return which items are held; changes neither order nor statistics."""
        ...

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark an item as used, so that it is evicted last."""
        ...

    def get_and_update_item(
        self, mm_item: ProcessedItem | None, mm_hash: str
    ) -> tuple[MultiModalKwargsItem | None, Sequence[ResolvedPromptUpdate]]:
        """Return the held item, or store `mm_item`; MultiModalCacheMissError without both."""
        ...


class MultiModalProcessingInfo(NamedTuple):
    """What processing found out about the items of a request."""

    kwargs: MultiModalKwargsItems
    hashes: Mapping[str, list[str]]
    prompt_updates: MultiModalPromptUpdates


class BaseMultiModalProcessor(ProcessorHooks[InfoT]):
    """Processes the requests of one model. One instance serves one thread at a time."""

    def __init__(
        self,
        info: InfoT,
        dummy_inputs: BaseDummyInputsBuilder[InfoT],
        *,
        cache: ProcessorCache | None = None,
    ) -> None:
        super().__init__(info, dummy_inputs)
        self.cache = cache
        self._hasher = MultiModalHasher(info.ctx.model_config.mm.mm_hasher_algorithm)

    def apply(
        self,
        prompt: str | list[int],
        mm_data: MultiModalDataDict | MultiModalDataItems | None = None,
        *,
        mm_uuids: MultiModalUUIDDict | None = None,
        hf_processor_mm_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> MultiModalInputs:
        """Process one request.

        Args:
            prompt: Text, or token ids, with a placeholder for each item (not yet expanded).
            mm_data: Per modality, one item or a list of items; or items that are parsed already.
            mm_uuids: Per modality, an id for each item (or None), which stands for its content.
            hf_processor_mm_kwargs: For the HF processor, over the operator's own.
            tokenization_kwargs: For the tokenizer, where the prompt is text
                (`{"add_special_tokens": False}` after a chat template).
        """
        validate_prompt(prompt, self.info.vocab_size)
        if isinstance(mm_data, MultiModalDataItems):
            mm_items = mm_data
        else:
            mm_items = self.info.parse_mm_data(mm_data or {})
        validate_placeholder_counts(self.info, prompt, mm_items.get_all_counts())
        mm_kwargs = dict(hf_processor_mm_kwargs or {})
        self.info.ctx.merge_mm_kwargs(mm_kwargs)  # refuses what only we may set
        hashes = self._hash_mm_items(mm_items, parse_mm_uuids(mm_uuids), mm_kwargs)
        call = ProcessorCall(mm_items, hashes, mm_kwargs, dict(tokenization_kwargs or {}))

        token_ids, mm_info, is_update_applied = self._cached_apply_hf_processor(prompt, call)
        token_ids, placeholders = self._maybe_apply_prompt_updates(
            mm_items, token_ids, mm_info, is_update_applied=is_update_applied
        )
        ranges = {
            modality: [placeholder.to_range() for placeholder in found]
            for modality, found in placeholders.items()
        }
        validate_reserved_tokens(self.info, token_ids, ranges)
        return MultiModalInputs(
            prompt_token_ids=token_ids,
            mm_kwargs=mm_info.kwargs,
            mm_hashes=mm_info.hashes,
            mm_placeholders=ranges,
            prompt=prompt if isinstance(prompt, str) else None,
        )

    def _hash_mm_items(
        self,
        mm_items: MultiModalDataItems,
        mm_uuids: Mapping[str, Sequence[str | None]],
        mm_kwargs: Mapping[str, object],
    ) -> dict[str, list[str]]:
        """Return one hash per item; a uuid stands for the content, verbatim where no kwargs are."""
        validate_mm_uuids(mm_items, mm_uuids)
        factors = {"mm_processor_kwargs": mm_kwargs} if mm_kwargs else {}
        hashes: dict[str, list[str]] = {}
        for modality, items in mm_items.items():
            uuids = mm_uuids.get(modality) or [None] * len(items)
            hashes[modality] = [
                uuid
                if uuid is not None and not factors
                else self._hasher.hash_kwargs(
                    model_id=self.info.model_id,
                    **{modality: items.get_item_for_hash(index) if uuid is None else uuid},
                    **factors,
                )
                for index, uuid in enumerate(uuids)
            ]
        return hashes

    def _cached_apply_hf_processor(
        self, prompt: str | list[int], call: ProcessorCall
    ) -> tuple[list[int], MultiModalProcessingInfo, bool]:
        """Process what the cache lacks, in one batch; return the rest from the cache."""
        cache = self.cache
        if cache is None or any(items.get_passthrough_data() for items in call.mm_items.values()):
            return self._apply_hf_processor(prompt, call)
        missing: dict[str, dict[str, int]] = {}  # modality -> hash -> index of its first item
        for modality, hashes in call.hashes.items():
            for index, is_cached in enumerate(cache.is_cached(hashes)):
                if not is_cached:
                    missing.setdefault(modality, {}).setdefault(hashes[index], index)
        mm_missing = self._select(
            call.mm_items, {modality: list(rows.values()) for modality, rows in missing.items()}
        )
        token_ids, hf_inputs, _ = self._apply_hf_processor_main(
            prompt, call._replace(mm_items=mm_missing), enable_hf_prompt_update=False
        )
        processed = self._split_into_items(mm_missing, hf_inputs, call.mm_kwargs)
        fresh = {
            mm_hash: (item.own_arrays(), alternatives)
            for modality, rows in missing.items()
            for mm_hash, (item, alternatives) in zip(rows, processed[modality], strict=True)
        }
        return token_ids, self._merge_with_cached(cache, call, fresh), False

    def _merge_with_cached(
        self, cache: ProcessorCache, call: ProcessorCall, fresh: dict[str, ProcessedItem]
    ) -> MultiModalProcessingInfo:
        # First every touch: storing a fresh item must not evict one that this request needs.
        for hashes in call.hashes.values():
            for mm_hash in hashes:
                cache.touch_sender_cache_item(mm_hash)
        kwargs, updates = MultiModalKwargsItems(), {}
        for modality, hashes in call.hashes.items():
            rows = []
            for index, mm_hash in enumerate(hashes):
                try:
                    rows.append(cache.get_and_update_item(fresh.get(mm_hash), mm_hash))
                except MultiModalCacheMissError:
                    # Evicted since we looked (another thread, or a cache smaller than a request).
                    fresh[mm_hash] = self._process_one(call, modality, index)
                    rows.append(cache.get_and_update_item(fresh[mm_hash], mm_hash))
            kwargs[modality] = [item for item, _ in rows]
            updates[modality] = [
                [self._recompute_cached_prompt_update(update, index) for update in alternatives]
                for index, (_, alternatives) in enumerate(rows)
            ]
        return MultiModalProcessingInfo(kwargs, call.hashes, updates)

    def _process_one(self, call: ProcessorCall, modality: str, index: int) -> ProcessedItem:
        mm_items = self._select(call.mm_items, {modality: [index]})
        hf_inputs = self._apply_hf_processor_mm_only(mm_items, call)
        return self._split_into_items(mm_items, hf_inputs, call.mm_kwargs)[modality][0]

    def _select(
        self, mm_items: MultiModalDataItems, rows: Mapping[str, Sequence[int]]
    ) -> MultiModalDataItems:
        """Return the items at `rows`, all of which must have data."""
        for modality, indices in rows.items():
            for index in indices:
                if mm_items[modality].get_item_for_hash(index) is None:
                    raise RequestValueError(
                        f"Cache miss for {modality} at index {index} but data is not provided; "
                        "send the data with its uuid again",
                        param="multi_modal_data",
                    )
        return MultiModalDataItems(
            {modality: mm_items[modality].select(indices) for modality, indices in rows.items()}
        )

    def _apply_hf_processor(
        self, prompt: str | list[int], call: ProcessorCall
    ) -> tuple[list[int], MultiModalProcessingInfo, bool]:
        """Process all items, without a cache."""
        rows = {modality: range(len(items)) for modality, items in call.mm_items.items()}
        mm_items = self._select(call.mm_items, rows)
        token_ids, hf_inputs, is_update_applied = self._apply_hf_processor_main(
            prompt, call, enable_hf_prompt_update=True
        )
        processed = self._split_into_items(mm_items, hf_inputs, call.mm_kwargs)
        kwargs = MultiModalKwargsItems(
            {modality: [item for item, _ in items] for modality, items in processed.items()}
        )
        updates = {
            modality: [alternatives for _, alternatives in items]
            for modality, items in processed.items()
        }
        info = MultiModalProcessingInfo(kwargs, call.hashes, updates)
        return token_ids, info, is_update_applied

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
                (item, alternatives)
                for item, alternatives in zip(kwargs[modality], updates[modality], strict=True)
                if item is not None
            ]
            for modality in counts
        }

    def _maybe_apply_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        token_ids: list[int],
        mm_info: MultiModalProcessingInfo,
        *,
        is_update_applied: bool,
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        counts = mm_items.get_all_counts()
        if is_update_applied:
            placeholders = self._find_mm_placeholders(token_ids, mm_info.prompt_updates)
        else:
            token_ids, placeholders = self._apply_prompt_updates(token_ids, mm_info.prompt_updates)
        validate_mm_placeholders(placeholders, counts)
        return token_ids, placeholders

    def get_mm_max_tokens_per_item(self, seq_len: int = 0) -> Mapping[str, int]:
        """Return the most embeddings of an item: as the model declares, or measured."""
        counts = {modality: 1 for modality, n in self.info.allowed_mm_limits.items() if n}
        declared = self.info.get_mm_max_tokens_per_item(seq_len, counts)
        if declared is not None:
            return {modality: declared[modality] for modality in counts}
        return self.measure_mm_max_tokens_per_item(seq_len, counts)

    def measure_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Process the dummy inputs and count embeddings per item."""
        inputs = self.dummy_inputs.get_dummy_processor_inputs(seq_len, mm_counts)
        processed = self.apply(
            inputs.prompt,
            self.info.parse_mm_data(inputs.mm_data, validate=False),
            hf_processor_mm_kwargs=inputs.hf_processor_mm_kwargs,
        )
        return {
            modality: max(placeholder.get_num_embeds() for placeholder in ranges)
            for modality, ranges in processed.mm_placeholders.items()
        }
