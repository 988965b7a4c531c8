"""The items of a request -> their tensors and prompt updates, each from the cache or from HF.

What HF gets is cut into batches of so many decoded bytes: of 16 large pictures one is there in
full at a time. An item's tensors are the same whatever its batch holds; that is what keeping them
by their own hashes rests on as well.

`BaseMultiModalProcessor` stands on it; families override what `ProcessorHooks` names.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from transformers import BatchFeature

from mmjax.errors import MediaIdConflictError, RequestValueError
from mmjax.processing.commit import ProcessorCache
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder
from mmjax.processing.hooks import InfoT, ProcessorHooks
from mmjax.processing.items.parse import (
    ModalityDataItems,
    MultiModalDataItems,
    MultiModalUUIDDict,
)
from mmjax.processing.media.decode import BYTES_PER_PIXEL
from mmjax.processing.media.decode_budget import MAX_BATCH_BYTES, DecodeBudget, split_by_bytes
from mmjax.processing.prepared import ProcessedItem
from mmjax.processing.prompt_updates.updates import MultiModalPromptUpdates, ResolvedPromptUpdate
from mmjax.processing.tensors.inputs import MultiModalKwargsItems
from mmjax.processing.validation import validate_mm_kwargs, validate_mm_updates


class ProcessedPrompt(NamedTuple):
    """A tokenized prompt, with what its items do to it."""

    token_ids: list[int]
    prompt_updates: MultiModalPromptUpdates
    fresh: Mapping[str, ProcessedItem]
    may_be_updated: bool
    """Whether the HF processor may have updated the prompt itself."""
    was_beside_media: bool
    """Whether it was given text and media together."""


class _Row(NamedTuple):
    """Where an item to be processed stands in its request, and what it is to be called."""

    modality: str
    place: int
    mm_hash: str


class ItemProcessing(ProcessorHooks[InfoT]):
    """Asks the cache what it holds, and HF for the rest; changes no cache."""

    def __init__(
        self,
        info: InfoT,
        dummy_inputs: BaseDummyInputsBuilder[InfoT],
        *,
        cache: ProcessorCache | None = None,
    ) -> None:
        super().__init__(info, dummy_inputs)
        self.cache = cache
        self.decode_budget = DecodeBudget(info.ctx.get_mm_config().max_media_decode_bytes)
        """Processors of one model share one."""

    def _cached_apply_hf_processor(
        self,
        prompt: str | list[int],
        mm_data_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
        mm_uuids: MultiModalUUIDDict,
    ) -> ProcessedPrompt:
        """Process what the cache lacks; the rest have their updates there.

        A family whose tensors depend on the request's other items calls `_apply_hf_processor` in
        its place for those requests (and names the items accordingly: `_get_hash_kwargs`).

        Args:
            prompt: As in `prepare`.
            mm_data_items: All items of the request.
            hf_processor_mm_kwargs: The request's own.
            tokenization_kwargs: As in `prepare`.
            mm_uuids: Per modality, what each item is known by: its hash, or what stands for it.
        """
        arguments = (prompt, mm_data_items, hf_processor_mm_kwargs, tokenization_kwargs, mm_uuids)
        cache = self.cache
        if cache is None or any(items.get_passthrough_data() for items in mm_data_items.values()):
            return self._apply_hf_processor(*arguments)
        known, missing = _look_up(cache, mm_uuids)
        return self._apply_in_batches(*arguments, known=known, missing=missing)

    def _apply_in_batches(
        self,
        prompt: str | list[int],
        mm_data_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
        mm_uuids: MultiModalUUIDDict,
        *,
        known: dict[str, Sequence[ResolvedPromptUpdate]],
        missing: Mapping[str, Mapping[str, int]],
    ) -> ProcessedPrompt:
        """Process the missing items apart from the prompt."""
        token_ids, _, may_be_updated = self._apply_hf_processor_main(
            prompt,
            MultiModalDataItems(),
            hf_processor_mm_kwargs,
            tokenization_kwargs,
            enable_hf_prompt_update=False,
        )
        if isinstance(prompt, str) and may_be_updated:
            may_be_updated = self._hf_processor_applies_updates(
                prompt, mm_data_items, hf_processor_mm_kwargs, tokenization_kwargs
            )
        fresh = self._process_missing(missing, mm_data_items, hf_processor_mm_kwargs)
        known.update({mm_hash: alternatives for mm_hash, (_, alternatives) in fresh.items()})
        updates = {
            modality: [
                [self._recompute_cached_prompt_update(update, index) for update in known[mm_hash]]
                for index, mm_hash in enumerate(hashes)
            ]
            for modality, hashes in mm_uuids.items()
        }
        return ProcessedPrompt(token_ids, updates, fresh, may_be_updated, was_beside_media=False)

    def _process_missing(
        self,
        missing: Mapping[str, Mapping[str, int]],
        mm_data_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
    ) -> dict[str, ProcessedItem]:
        """Process items (per modality: hash -> index), and forget each batch's pixels.

        Whether the request may have all of them is settled before the first is decoded.
        """
        rows = [
            _Row(modality, index, mm_hash)
            for modality, indices in missing.items()
            for mm_hash, index in indices.items()
        ]
        sizes = self._admit(rows, mm_data_items)
        cancellation = mm_data_items.control.cancellation
        fresh: dict[str, ProcessedItem] = {}
        for batch, num_bytes in split_by_bytes(zip(rows, sizes, strict=True)):
            cancellation.check()
            with self.decode_budget.hold(num_bytes, cancellation):
                batch_rows: dict[str, dict[str, int]] = {}
                for modality, place, mm_hash in batch:
                    batch_rows.setdefault(modality, {})[mm_hash] = place
                mm_items = _select(mm_data_items, batch_rows)
                hf_inputs = self._apply_hf_processor_mm_only(mm_items, hf_processor_mm_kwargs, {})
                processed = self._split_into_items(mm_items, hf_inputs, hf_processor_mm_kwargs)
                fresh |= self._to_fresh(batch_rows, processed)
                mm_items.drop_decoded()
                del hf_inputs, processed
        return fresh

    def _admit(self, rows: Sequence[_Row], mm_items: MultiModalDataItems) -> list[int]:
        """Return how many bytes each item decodes to; refuse too many, and items without data."""
        for modality, place, _ in rows:
            _check_data(modality, mm_items[modality], [place])
        sizes = [mm_items[row.modality].count_bytes_to_decode(row.place) for row in rows]
        limit = self.info.ctx.get_mm_config().max_media_request_decode_bytes
        for row, total in zip(rows, accumulate(sizes), strict=True):
            if total > limit:
                param = mm_items[row.modality].get_param(row.place)
                raise RequestValueError(
                    f"the media up to `{param}` take {total} bytes when they are decoded "
                    f"({BYTES_PER_PIXEL} for a pixel), at most {limit} are accepted of one "
                    "request; send fewer or smaller ones, or set "
                    "`--max-media-request-decode-bytes` higher",
                    param=param,
                )
        mm_items.control.admit(sum(sizes))
        return sizes

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

    def _apply_hf_processor(
        self,
        prompt: str | list[int],
        mm_data_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
        mm_uuids: MultiModalUUIDDict,
    ) -> ProcessedPrompt:
        """Process all items, without asking a cache; text and items together."""
        arguments = (prompt, mm_data_items, hf_processor_mm_kwargs, tokenization_kwargs)
        rows = [
            _Row(modality, index, mm_hash)
            for modality, hashes in mm_uuids.items()
            for index, mm_hash in enumerate(hashes)
        ]
        num_bytes = sum(self._admit(rows, mm_data_items))
        if num_bytes > MAX_BATCH_BYTES:
            _, missing = _look_up(None, mm_uuids)
            return self._apply_in_batches(*arguments, mm_uuids, known={}, missing=missing)
        with self.decode_budget.hold(num_bytes, mm_data_items.control.cancellation):
            token_ids, hf_inputs, may_be_updated = self._apply_hf_processor_main(
                *arguments, enable_hf_prompt_update=True
            )
            processed = self._split_into_items(mm_data_items, hf_inputs, hf_processor_mm_kwargs)
            mm_data_items.drop_decoded()
        fresh: dict[str, ProcessedItem] = {}
        for modality, items in processed.items():
            for mm_hash, (item, alternatives) in zip(mm_uuids[modality], items, strict=True):
                kept = item if self.cache is None else item.own_arrays()
                _add_fresh(fresh, mm_hash, (kept, alternatives))
        updates = {
            modality: [alternatives for _, alternatives in items]
            for modality, items in processed.items()
        }
        has_passthrough = any(items.get_passthrough_data() for items in mm_data_items.values())
        return ProcessedPrompt(
            token_ids, updates, fresh, may_be_updated, was_beside_media=not has_passthrough
        )

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


def _select(
    mm_items: MultiModalDataItems, rows: Mapping[str, Mapping[str, int]]
) -> MultiModalDataItems:
    """Return the items at `rows` (per modality: hash -> index)."""
    return MultiModalDataItems(
        {
            modality: mm_items[modality].select(list(indices.values()))
            for modality, indices in rows.items()
        }
    )


def _look_up(
    cache: ProcessorCache | None, hashes_by_modality: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Sequence[ResolvedPromptUpdate]], dict[str, dict[str, int]]]:
    """Return the held items' updates, and per modality the others: hash -> first index."""
    known: dict[str, Sequence[ResolvedPromptUpdate]] = {}
    missing: dict[str, dict[str, int]] = {}
    for modality, hashes in hashes_by_modality.items():
        are_held = [False] * len(hashes) if cache is None else cache.is_cached(hashes)
        for index, (mm_hash, is_held) in enumerate(zip(hashes, are_held, strict=True)):
            updates = cache.peek_prompt_updates(mm_hash) if cache and is_held else None
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
