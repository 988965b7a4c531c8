"""Prompt and media -> token ids with placeholders, and the items' tensors: the flow of every model.

A family subclasses `BaseMultiModalProcessor` and overrides `_get_mm_fields_config` and
`_get_prompt_updates`. Knows no cache but through `ProcessorCache`, and no engine.

A request is processed in two steps. `prepare` does the work, and changes no cache. `commit` is
short, and the only place where the cache changes: who sends the result to the engine holds a lock
around both, so that the engine sees requests in the order of their commits.

A text prompt goes to the HF processor: without a cache together with its media, with a cache
alone. Token ids do not: `_apply_hf_processor_tokens_only` does to them what HF does to any text.
With a cache, or with token ids, the media go alone (with dummy text, in batches of the items that
the cache lacks: `missing_items`). Where HF has written the updated placeholders they are found in
the prompt; where not, the updates are applied here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic

from transformers import BatchFeature

from mmjax.errors import ConfigError, MultiModalCacheMissError, RequestValueError
from mmjax.processing.commit import ProcessorCache
from mmjax.processing.context import InfoT
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder
from mmjax.processing.faults import process_and_blame
from mmjax.processing.hashing.item_hashes import ItemHasher
from mmjax.processing.hf_call import get_only_row
from mmjax.processing.image_processors.affine import AFFINE_KEYS
from mmjax.processing.items.embeddings import DictEmbeddingItems, EmbeddingItems
from mmjax.processing.items.items import MultiModalDataItems
from mmjax.processing.items.parse import MultiModalDataDict
from mmjax.processing.items.uuids import (
    MultiModalUUIDDict,
    complete_mm_data,
    parse_mm_uuids,
    validate_mm_uuids,
)
from mmjax.processing.media.decode_budget import MAX_BATCH_BYTES, DecodeBudget, DecodeControl
from mmjax.processing.missing_items import (
    ItemRow,
    admit_items,
    find_missing,
    list_rows,
    name_items,
    process_in_batches,
)
from mmjax.processing.prepared import AnswerParser, PreparedInputs, ProcessedItem, ProcessedPrompt
from mmjax.processing.prompt_updates.matching import (
    MultiModalPromptUpdatesApplyResult,
    apply_text_matches,
    apply_token_matches,
    find_mm_placeholders,
    find_unapplied,
)
from mmjax.processing.prompt_updates.updates import (
    MultiModalPromptUpdates,
    PlaceholderFeaturesInfo,
    PromptUpdate,
    ResolvedPromptUpdate,
    as_ids,
    resolve_updates,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig, tensors_as_numpy
from mmjax.processing.tensors.inputs import (
    MultiModalInputs,
    MultiModalKwargsItems,
    argsort_mm_positions,
)
from mmjax.processing.validation import (
    validate_all_applied,
    validate_mm_kwargs,
    validate_mm_placeholders,
    validate_mm_updates,
    validate_placeholder_counts,
    validate_prompt,
    validate_reserved_tokens,
)
from mmjax.requests.request_times import measuring


class BaseMultiModalProcessor(ABC, Generic[InfoT]):
    """Processes the requests of one model. One instance serves one thread at a time."""

    requires_tokenizer: ClassVar[bool] = True

    only_tokenizes_text: ClassVar[bool] = False
    """Whether the HF processor only tokenizes a text without media. Then the tokenizer is called:
    the processor would check and merge kwargs for longer than it tokenizes."""

    def __init__(
        self,
        info: InfoT,
        dummy_inputs: BaseDummyInputsBuilder[InfoT],
        *,
        cache: ProcessorCache | None = None,
    ) -> None:
        if self.requires_tokenizer and info.ctx.tokenizer is None:
            raise ConfigError(
                f"{type(self).__name__} works with text, and there is no tokenizer; give one"
            )
        self.info = info
        self.dummy_inputs = dummy_inputs
        self.cache = cache
        mm = info.ctx.get_mm_config()
        self.item_hasher = ItemHasher(info.model_id, mm.mm_hasher_algorithm)
        """Processors of one model may share one, and with it what is known of encoded media."""
        self.decode_budget = DecodeBudget(mm.max_media_decode_bytes)
        """Processors of one model share one."""
        self._max_request_bytes = mm.max_media_request_decode_bytes

    # ---- what a family must say ------------------------------------------------------------------

    @abstractmethod
    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """Say for each tensor of the HF processor's output how it divides among items."""

    @abstractmethod
    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        """Say what each item does to the prompt; several of one modality are alternatives."""

    # ---- what a family may override: how its HF processor is called, and what it does ------------

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        """Call the HF processor on text and media."""
        if "audios" in mm_data:  # HF's name for all of them
            mm_data = {**mm_data, "audio": mm_data["audios"]}
            del mm_data["audios"]
        self.info.check_sizes(mm_data, mm_kwargs)
        return self.info.ctx.call_hf_processor(
            self.info.get_hf_processor(), {"text": prompt, **mm_data}, {**mm_kwargs, **tok_kwargs}
        )

    def _hf_processor_applies_updates(
        self,
        prompt: str,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> bool:
        """Whether the HF processor may update the prompt itself, given text.

        If so, it has where the updated placeholders are found in the ids that it returns; if not,
        nobody looks, and the updates are applied here.
        """
        kinds = EmbeddingItems | DictEmbeddingItems
        return not any(isinstance(items, kinds) for items in mm_items.values())

    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        """Do to a prompt of token ids what the HF processor does to any text (a family's hook)."""
        return prompt_tokens

    def _get_hash_kwargs(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, object]:
        """Return what, beside its content, an item's tensors depend on: caches name it by both.

        A family whose tensors depend on the request's other items adds to the request's kwargs
        what of them does (as `{**hf_processor_mm_kwargs, "crops": False}`).
        """
        return hf_processor_mm_kwargs

    def _apply_hf_processor_main(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
        *,
        enable_hf_prompt_update: bool,
    ) -> tuple[list[int], Mapping[str, Any], bool]:
        """Return token ids, the HF processor's tensors, and whether it may have updated the prompt.

        Text goes through the HF processor: with the items where `enable_hf_prompt_update` allows
        it, else alone. Token ids go by it.
        """
        may_be_updated = False
        if isinstance(prompt, str):
            may_be_updated = self._hf_processor_applies_updates(
                prompt, mm_items, hf_processor_mm_kwargs, tokenization_kwargs
            )
            # HF's processors count the prompt's placeholders against their own items: embeddings,
            # which they never see, must not be among them.
            if enable_hf_prompt_update and mm_items and not mm_items.get_passthrough_data():
                token_ids, hf_inputs = self._apply_hf_processor_text_mm(
                    prompt, mm_items, hf_processor_mm_kwargs, tokenization_kwargs
                )
                return token_ids, hf_inputs, may_be_updated
            token_ids = self._apply_hf_processor_text_only(
                prompt, tokenization_kwargs, hf_processor_mm_kwargs=hf_processor_mm_kwargs
            )
        else:
            token_ids = self._apply_hf_processor_tokens_only(list(prompt))
        hf_inputs = self._apply_hf_processor_mm_only(mm_items, hf_processor_mm_kwargs, {})
        return token_ids, hf_inputs, may_be_updated

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
        `mm_uuids`: per modality, what each item is known by: its hash, or what stands for it.
        """
        arguments = (prompt, mm_data_items, hf_processor_mm_kwargs, tokenization_kwargs, mm_uuids)
        if self.cache is None or mm_data_items.get_passthrough_data():
            return self._apply_hf_processor(*arguments)
        return self._apply_in_batches(*arguments, cache=self.cache)

    # ---- what a family may override: the prompt and its updates ----------------------------------

    def _apply_token_matches(
        self, prompt: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> tuple[list[int], MultiModalPromptUpdatesApplyResult]:
        return apply_token_matches(prompt, mm_prompt_updates, self.info.get_tokenizer())

    def _apply_text_matches(
        self, prompt: str, mm_prompt_updates: MultiModalPromptUpdates
    ) -> tuple[str, MultiModalPromptUpdatesApplyResult]:
        return apply_text_matches(prompt, mm_prompt_updates, self.info.get_tokenizer())

    def _find_mm_placeholders(
        self, token_ids: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> Mapping[str, list[PlaceholderFeaturesInfo]]:
        return find_mm_placeholders(token_ids, mm_prompt_updates, self.info.get_tokenizer())

    def _recompute_cached_prompt_update(
        self, cached_update: ResolvedPromptUpdate, new_item_idx: int
    ) -> ResolvedPromptUpdate:
        """Adapt a cached update to the item's index in this request."""
        return replace(cached_update, item_idx=new_item_idx)

    def _create_prompts(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        decoder_prompt: str | list[int] | None,
    ) -> tuple[str | list[int], str | list[int] | None]:
        """Return the prompt in which the items stand, and the decoder's where it is another."""
        if decoder_prompt is not None:
            raise RequestValueError(
                "decoder_prompt is given, but this model has no encoder; leave it out",
                param="decoder_prompt",
            )
        return prompt, None

    def _get_answer_parser(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> AnswerParser | None:
        """Return what parses the answer to a prompt, as it came; None: it is text alone."""
        return None

    # ---- one request -----------------------------------------------------------------------------

    def apply(
        self,
        prompt: str | list[int],
        mm_data: MultiModalDataDict | MultiModalDataItems | None = None,
        hf_processor_mm_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        *,
        mm_uuids: MultiModalUUIDDict | None = None,
        decoder_prompt: str | list[int] | None = None,
        id_domain: str | None = None,
        request_id: str | None = None,
    ) -> MultiModalInputs:
        """Process one request: `prepare`, `commit`, and `rebuild` where the cache lost an item."""
        prepared = self.prepare(
            prompt,
            mm_data,
            hf_processor_mm_kwargs,
            tokenization_kwargs,
            mm_uuids=mm_uuids,
            decoder_prompt=decoder_prompt,
            id_domain=id_domain,
            request_id=request_id,
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
        hf_processor_mm_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        *,
        mm_uuids: MultiModalUUIDDict | None = None,
        decoder_prompt: str | list[int] | None = None,
        id_domain: str | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
        control: DecodeControl | None = None,
    ) -> PreparedInputs:
        """Do a request's work, without changing the cache.

        Args:
            prompt: Text, or token ids, with a placeholder for each item (not yet expanded).
            mm_data: Per modality, one item or a list of items; or items that are parsed already.
            hf_processor_mm_kwargs: For the HF processor, over the operator's own.
            tokenization_kwargs: For the tokenizer, where the prompt is text
                (`{"add_special_tokens": False}` after a chat template).
            mm_uuids: Per modality, an id for each item (or None), which stands for its content.
            decoder_prompt: For an encoder-decoder model, in place of the decoder's own.
            id_domain: Whose uuids these are: claims, which the content must bear out. None: they
                are trusted.
            cache_salt: Whose caches these are: items of different salts have different names.
            request_id: Given where nothing is kept by its content: an item without a uuid is
                then named after the request, and not hashed.
            control: Asked before anything is decoded, and between one batch and the next.
        """
        validate_prompt(prompt, self.info.vocab_size)
        uuids = parse_mm_uuids(mm_uuids)
        if not isinstance(mm_data, MultiModalDataItems):
            mm_data = self.info.parse_mm_data(complete_mm_data(mm_data or {}, uuids))
        mm_items = mm_data
        own_prompt, decoders = self._create_prompts(prompt, mm_items, decoder_prompt)
        validate_placeholder_counts(self.info, own_prompt, mm_items.get_all_counts())
        mm_kwargs = dict(hf_processor_mm_kwargs or {})
        self.info.check_mm_kwargs(mm_kwargs)
        validate_mm_uuids(mm_items, uuids)
        names = {"id_domain": id_domain, "cache_salt": cache_salt, "request_id": request_id}
        factors = self._get_hash_kwargs(mm_items, mm_kwargs)
        hashed = self.item_hasher.identify(mm_items, uuids, factors, **names)
        if control is not None:
            mm_items = mm_items.with_control(control)
        tok_kwargs = dict(tokenization_kwargs or {})
        prepared = process_and_blame(
            lambda kwargs: self._prepare(
                own_prompt, mm_items, kwargs, tok_kwargs, hashed.by_modality
            ),
            mm_kwargs,
        )
        self.item_hasher.bind(hashed)
        prepared = replace(prepared, parse_answer=self._get_answer_parser(prompt, mm_items))
        mm_items.drop_decoded()
        if decoders is None:
            return prepared
        return prepared.with_decoder_prompt(prompt, as_ids(decoders, self.info.get_tokenizer()))

    def _prepare(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
        mm_hashes: Mapping[str, list[str]],
    ) -> PreparedInputs:
        processed = self._cached_apply_hf_processor(
            prompt, mm_items, mm_kwargs, tok_kwargs, mm_uuids=mm_hashes
        )
        token_ids, placeholders = self._maybe_apply_prompt_updates(
            prompt, mm_items, mm_kwargs, tok_kwargs, processed
        )
        ranges = {
            modality: [placeholder.to_range() for placeholder in found]
            for modality, found in placeholders.items()
        }
        validate_reserved_tokens(self.info, prompt, token_ids, ranges)
        return PreparedInputs(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            mm_hashes=mm_hashes,
            mm_placeholders=ranges,
            fresh=processed.fresh,
            mm_items=mm_items,
            mm_kwargs=mm_kwargs,
        )

    def commit(self, prepared: PreparedInputs) -> MultiModalInputs:
        """Bring a request's items to the cache; MultiModalCacheMissError before any change.

        The error names every hash that is neither fresh nor held: `rebuild` them.
        """
        if self.cache is None:
            return prepared.to_inputs()
        places = argsort_mm_positions(prepared.mm_placeholders)
        hashes = [prepared.mm_hashes[modality][index] for modality, index in places]
        given = [prepared.fresh.get(mm_hash) for mm_hash in hashes]
        items = [item for item, _ in self.cache.get_and_update(given, hashes)]
        return prepared.to_inputs(dict(zip(places, items, strict=True)))

    def rebuild(self, prepared: PreparedInputs, mm_hashes: Sequence[str]) -> PreparedInputs:
        """Make items fresh again, from their media; RequestError where only a uuid was given."""
        wanted = set(mm_hashes) - prepared.fresh.keys()
        missing = [row for row in list_rows(prepared.mm_hashes) if row.mm_hash in wanted]
        # It was admitted before; whether it is still wanted counts on.
        control = DecodeControl(prepared.mm_items.control.cancellation)
        mm_items = prepared.mm_items.with_control(control)
        fresh = self._process_missing(missing, mm_items, prepared.mm_kwargs)
        return replace(prepared, fresh={**prepared.fresh, **fresh})

    # ---- items, from the cache or from HF --------------------------------------------------------

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
        rows = list_rows(mm_uuids)
        num_bytes = sum(admit_items(rows, mm_data_items, self._max_request_bytes))
        if num_bytes > MAX_BATCH_BYTES:
            return self._apply_in_batches(*arguments, mm_uuids, cache=None)
        cancellation = mm_data_items.control.cancellation
        with self.decode_budget.hold(num_bytes, cancellation, on_wait=mm_data_items.drop_decoded):
            token_ids, hf_inputs, may_be_updated = self._apply_hf_processor_main(
                *arguments, enable_hf_prompt_update=True
            )
            processed = self._split_into_items(mm_data_items, hf_inputs, hf_processor_mm_kwargs)
            mm_data_items.drop_decoded()
        fresh = name_items(rows, processed, owns_arrays=self.cache is not None)
        updates = {
            modality: [alternatives for _, alternatives in items]
            for modality, items in processed.items()
        }
        was_beside_media = not mm_data_items.get_passthrough_data()
        return ProcessedPrompt(token_ids, updates, fresh, may_be_updated, was_beside_media)

    def _apply_in_batches(
        self,
        prompt: str | list[int],
        mm_data_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
        mm_uuids: MultiModalUUIDDict,
        *,
        cache: ProcessorCache | None,
    ) -> ProcessedPrompt:
        """Process the items that the cache lacks apart from the prompt."""
        known, missing = find_missing(cache, mm_uuids)
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
        missing: Sequence[ItemRow],
        mm_data_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
    ) -> dict[str, ProcessedItem]:
        """Process some items apart from the prompt, so many bytes at a time; return by hash."""

        def process(mm_items: MultiModalDataItems) -> Mapping[str, Sequence[ProcessedItem]]:
            hf_inputs = self._apply_hf_processor_mm_only(mm_items, hf_processor_mm_kwargs, {})
            return self._split_into_items(mm_items, hf_inputs, hf_processor_mm_kwargs)

        return process_in_batches(
            missing,
            mm_data_items,
            process,
            budget=self.decode_budget,
            max_request_bytes=self._max_request_bytes,
        )

    def _split_into_items(
        self,
        mm_items: MultiModalDataItems,
        hf_inputs: Mapping[str, Any],
        mm_kwargs: Mapping[str, object],
    ) -> dict[str, list[ProcessedItem]]:
        """Divide the HF processor's batch, and resolve each item's prompt updates."""
        counts = {m: n for m, n in mm_items.get_all_counts().items() if n}
        if not counts:
            return {modality: [] for modality in mm_items}
        features = BatchFeature(dict(hf_inputs))
        fields = {
            **self._get_mm_fields_config(features, mm_kwargs),
            **{AFFINE_KEYS[m]: MultiModalFieldConfig.shared(m, n) for m, n in counts.items()},
        }
        kwargs = MultiModalKwargsItems.from_hf_inputs(features, fields)
        validate_mm_kwargs(kwargs, counts)
        updates = resolve_updates(self._get_prompt_updates(mm_items, mm_kwargs, kwargs), counts)
        validate_mm_updates(updates, counts)
        return {
            m: [(kwargs.get_item(m, i), alternatives) for i, alternatives in enumerate(updates[m])]
            for m in counts
        }

    # ---- text and items, together or apart -------------------------------------------------------

    def _apply_hf_processor_text_mm(
        self,
        prompt_text: str,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> tuple[list[int], Mapping[str, Any]]:
        """Call the HF processor on text and items; return token ids and tensors."""
        mm_data: dict[str, object] = {}
        for items in mm_items.values():
            if len(items):
                with measuring("decode"):
                    mm_data.update(items.get_processor_data())
        outputs = dict(
            self._call_hf_processor(
                prompt_text, mm_data, hf_processor_mm_kwargs, tokenization_kwargs
            )
        )
        return get_only_row(outputs.pop("input_ids")), outputs

    def _apply_hf_processor_text_only(
        self,
        prompt_text: str,
        tokenization_kwargs: Mapping[str, object],
        *,
        hf_processor_mm_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return what the HF processor makes of text alone.

        An HF processor that refuses placeholders without media, or writes something for media
        that are not there, is mended in `_call_hf_processor`, where `mm_data` is empty.
        """
        mm_kwargs = hf_processor_mm_kwargs or {}
        with measuring("tokenize"):
            if self.only_tokenizes_text and not self.info.ctx.merge_mm_kwargs(mm_kwargs):
                tokenizer = self.info.get_tokenizer()
                return list(tokenizer.encode(prompt_text, **tokenization_kwargs))
            token_ids, _ = self._apply_hf_processor_text_mm(
                prompt_text, MultiModalDataItems(), mm_kwargs, tokenization_kwargs
            )
        return token_ids

    def _apply_hf_processor_mm_only(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> Mapping[str, Any]:
        """Process items without the prompt: dummy text satisfies the HF processor."""
        # The user may write into an array later: what a cache keeps of it must not change.
        passthrough = {
            key: tensors_as_numpy(data, copy=True)
            for key, data in mm_items.get_passthrough_data().items()
        }
        processed = mm_items.select(
            [m for m, items in mm_items.items() if len(items) and items.get_processor_data()]
        )
        if not processed:
            return passthrough
        dummy_text = self.dummy_inputs.get_dummy_text(processed.get_all_counts())
        _, hf_inputs = self._apply_hf_processor_text_mm(
            dummy_text, processed, hf_processor_mm_kwargs, tokenization_kwargs
        )
        return {**hf_inputs, **passthrough}

    # ---- the updates of the prompt ---------------------------------------------------------------

    def _maybe_apply_prompt_updates(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
        processed: ProcessedPrompt,
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        """Find the updated placeholders where the HF processor wrote them; else write them."""
        token_ids, updates = processed.token_ids, processed.prompt_updates
        counts = {m: n for m, n in mm_items.get_all_counts().items() if n}
        if not counts:
            return token_ids, {}
        if processed.may_be_updated and isinstance(prompt, str):
            placeholders = self._find_mm_placeholders(token_ids, updates)
            if all(len(placeholders.get(m, ())) == n for m, n in counts.items()):
                return token_ids, placeholders
            if processed.was_beside_media:
                token_ids, _, _ = self._apply_hf_processor_main(
                    prompt,
                    MultiModalDataItems(),
                    mm_kwargs,
                    tok_kwargs,
                    enable_hf_prompt_update=False,
                )
                if token_ids != processed.token_ids:
                    # It did something for the media, and not what the family says.
                    validate_mm_placeholders(self.info, placeholders, counts)
        token_ids, placeholders = self._apply_prompt_updates(token_ids, updates)
        validate_mm_placeholders(self.info, placeholders, counts)
        return token_ids, placeholders

    def _apply_prompt_updates(
        self, token_ids: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        """Update the prompt by tokens, or by text where a target hides inside other tokens."""
        if not any(mm_prompt_updates.values()):
            return token_ids, {}
        new_token_ids, result = self._apply_token_matches(token_ids, mm_prompt_updates)
        if find_unapplied(result) is not None:
            tokenizer = self.info.get_tokenizer()
            text, result = self._apply_text_matches(tokenizer.decode(token_ids), mm_prompt_updates)
            new_token_ids = tokenizer.encode(text, add_special_tokens=False)
            validate_all_applied(self.info, result)
        return new_token_ids, self._find_mm_placeholders(new_token_ids, mm_prompt_updates)
