"""Prompt and media -> token ids with placeholders, and the items' tensors: the flow of every model.

A family subclasses `BaseMultiModalProcessor` and overrides `_get_mm_fields_config` and
`_get_prompt_updates`. Knows no cache but through `ProcessorCache`, and no engine.

A request is processed in two steps. `prepare` does the work, and changes no cache. `commit` is
short, and the only place where the cache changes: who sends the result to the engine holds a lock
around both, so that the engine sees requests in the order of their commits.

A text prompt without a cache goes to the HF processor together with its media, which then updates
the prompt itself. With a cache, or with token ids, the media go alone (with dummy text, in one
batch of the items that the cache lacks), and the updates are applied here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import BatchFeature

from mmjax.errors import MultiModalCacheMissError, RequestValueError
from mmjax.processing.commit import ProcessorCache, commit_items
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder
from mmjax.processing.hasher import MultiModalHasher
from mmjax.processing.hooks import InfoT, ProcessorHooks
from mmjax.processing.inputs import (
    MultiModalInputs,
    MultiModalKwargsItems,
    argsort_mm_positions,
)
from mmjax.processing.parse import (
    ModalityDataItems,
    MultiModalDataDict,
    MultiModalDataItems,
    MultiModalUUIDDict,
    parse_mm_uuids,
    validate_mm_uuids,
)
from mmjax.processing.prepared import PreparedInputs, ProcessedItem, ProcessorCall
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


class ProcessedPrompt(NamedTuple):
    """A tokenized prompt, with what its items do to it."""

    token_ids: list[int]
    prompt_updates: MultiModalPromptUpdates
    fresh: Mapping[str, ProcessedItem]
    is_update_applied: bool
    """Whether the HF processor has updated the prompt itself."""


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
        decoder_prompt: str | list[int] | None = None,
    ) -> MultiModalInputs:
        """Process one request: `prepare`, `commit`, and `rebuild` where the cache lost an item."""
        prepared = self.prepare(
            prompt,
            mm_data,
            mm_uuids=mm_uuids,
            hf_processor_mm_kwargs=hf_processor_mm_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            decoder_prompt=decoder_prompt,
        )
        while True:
            try:
                return self.commit(prepared)
            except MultiModalCacheMissError as error:
                # Evicted since `prepare` looked; every round makes more items fresh.
                prepared = self.rebuild(prepared, error.mm_hashes)

    def prepare(
        self,
        prompt: str | list[int],
        mm_data: MultiModalDataDict | MultiModalDataItems | None = None,
        *,
        mm_uuids: MultiModalUUIDDict | None = None,
        hf_processor_mm_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        decoder_prompt: str | list[int] | None = None,
    ) -> PreparedInputs:
        """Do a request's work, without changing the cache.

        Args:
            prompt: Text, or token ids, with a placeholder for each item (not yet expanded).
            mm_data: Per modality, one item or a list of items; or items that are parsed already.
            mm_uuids: Per modality, an id for each item (or None), which stands for its content.
            hf_processor_mm_kwargs: For the HF processor, over the operator's own.
            tokenization_kwargs: For the tokenizer, where the prompt is text
                (`{"add_special_tokens": False}` after a chat template).
            decoder_prompt: For an encoder-decoder model, in place of the decoder's own.
        """
        if decoder_prompt is not None:
            raise RequestValueError(
                "decoder_prompt is given, but this model has no encoder; leave it out",
                param="decoder_prompt",
            )
        validate_prompt(prompt, self.info.vocab_size)
        mm_items = self._to_mm_items(mm_data)
        validate_placeholder_counts(self.info, prompt, mm_items.get_all_counts())
        mm_kwargs = dict(hf_processor_mm_kwargs or {})
        self.info.ctx.merge_mm_kwargs(mm_kwargs)  # refuses what only we may set
        hashes = self._hash_mm_items(mm_items, parse_mm_uuids(mm_uuids), mm_kwargs)
        call = ProcessorCall(mm_items, hashes, mm_kwargs, dict(tokenization_kwargs or {}))

        processed = self._cached_apply_hf_processor(prompt, call)
        token_ids, placeholders = self._maybe_apply_prompt_updates(mm_items, processed)
        ranges = {
            modality: [placeholder.to_range() for placeholder in found]
            for modality, found in placeholders.items()
        }
        validate_reserved_tokens(self.info, token_ids, ranges)
        return PreparedInputs(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            mm_hashes=hashes,
            mm_placeholders=ranges,
            fresh=processed.fresh,
            call=call,
        )

    def commit(self, prepared: PreparedInputs) -> MultiModalInputs:
        """Bring a request's items to the cache; MultiModalCacheMissError before any change.

        The error names every hash that is neither fresh nor held: `rebuild` them.
        """
        places = argsort_mm_positions(prepared.mm_placeholders)
        hashes = [prepared.mm_hashes[modality][index] for modality, index in places]
        if self.cache is None:
            rows = [prepared.fresh[mm_hash][0] for mm_hash in hashes]
        else:
            rows = commit_items(self.cache, hashes, prepared.fresh)
        by_place = dict(zip(places, rows, strict=True))
        return MultiModalInputs(
            prompt_token_ids=prepared.prompt_token_ids,
            encoder_prompt_token_ids=prepared.encoder_prompt_token_ids,
            mm_kwargs=MultiModalKwargsItems(
                {
                    modality: [by_place[modality, index] for index in range(len(hashes))]
                    for modality, hashes in prepared.mm_hashes.items()
                }
            ),
            mm_hashes=prepared.mm_hashes,
            mm_placeholders=prepared.mm_placeholders,
            prompt=prepared.prompt,
        )

    def rebuild(self, prepared: PreparedInputs, mm_hashes: Sequence[str]) -> PreparedInputs:
        """Make items fresh again, from their media; RequestError where only a uuid was given."""
        wanted = set(mm_hashes) - prepared.fresh.keys()
        call = prepared.call
        rows: dict[str, dict[str, int]] = {}
        for modality, hashes in call.hashes.items():
            for index, mm_hash in enumerate(hashes):
                if mm_hash in wanted:
                    rows.setdefault(modality, {}).setdefault(mm_hash, index)
        mm_items = self._select(call.mm_items, rows)
        hf_inputs = self._apply_hf_processor_mm_only(mm_items, call)
        fresh = self._to_fresh(rows, self._split_into_items(mm_items, hf_inputs, call.mm_kwargs))
        return replace(prepared, fresh={**prepared.fresh, **fresh})

    def _to_mm_items(
        self, mm_data: MultiModalDataDict | MultiModalDataItems | None
    ) -> MultiModalDataItems:
        if isinstance(mm_data, MultiModalDataItems):
            return mm_data
        return self.info.parse_mm_data(mm_data or {})

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
        return {
            mm_hash: (item.own_arrays(), alternatives)
            for modality, hashes in rows.items()
            for mm_hash, (item, alternatives) in zip(hashes, processed[modality], strict=True)
        }

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
                fresh.setdefault(mm_hash, (kept, alternatives))
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
                (item, alternatives)
                for item, alternatives in zip(kwargs[modality], updates[modality], strict=True)
                if item is not None
            ]
            for modality in counts
        }

    def _maybe_apply_prompt_updates(
        self, mm_items: MultiModalDataItems, processed: ProcessedPrompt
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        token_ids, updates = processed.token_ids, processed.prompt_updates
        if processed.is_update_applied:
            placeholders = self._find_mm_placeholders(token_ids, updates)
        else:
            token_ids, placeholders = self._apply_prompt_updates(token_ids, updates)
        validate_mm_placeholders(placeholders, mm_items.get_all_counts())
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
        prepared = self.prepare(
            inputs.prompt,
            self.info.parse_mm_data(inputs.mm_data, validate=False),
            hf_processor_mm_kwargs=inputs.hf_processor_mm_kwargs,
        )
        return {
            modality: max(placeholder.get_num_embeds() for placeholder in ranges)
            for modality, ranges in prepared.mm_placeholders.items()
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
                known[mm_hash] = updates
    return known, missing


def _check_data(modality: str, items: ModalityDataItems, indices: Iterable[int]) -> None:
    """Refuse items of which only a uuid was given."""
    for index in indices:
        if items.get_item_for_hash(index) is None:
            raise RequestValueError(
                f"Cache miss for {modality} at index {index} but data is not provided; "
                "send the data with its uuid again",
                param="multi_modal_data",
            )
