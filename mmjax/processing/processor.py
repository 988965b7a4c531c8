"""Prompt and media -> token ids with placeholders, and the items' tensors: the flow of every model.

A family subclasses `BaseMultiModalProcessor` and overrides `_get_mm_fields_config` and
`_get_prompt_updates`. Knows no cache but through `ProcessorCache`, and no engine.

A request is processed in two steps. `prepare` does the work, and changes no cache. `commit` is
short, and the only place where the cache changes: who sends the result to the engine holds a lock
around both, so that the engine sees requests in the order of their commits.

`prepare` tokenizes the prompt alone (`_tokenize`, `info.frame_prompt`), has the HF processor
process the items that the cache lacks, apart from the prompt and beside dummy text, and applies
the items' prompt updates, unless the HF processor has written them into the text already.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic

from transformers import BatchFeature

from mmjax.errors import ConfigError, MultiModalCacheMissError, RequestValueError
from mmjax.processing.context import InfoT
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder
from mmjax.processing.hashing.item_hashes import ItemHasher
from mmjax.processing.image_processors.affine import AFFINE_KEYS
from mmjax.processing.items.embeddings import DictEmbeddingItems, EmbeddingItems
from mmjax.processing.items.items import MultiModalDataItems
from mmjax.processing.items.parse import (
    MultiModalDataDict,
    MultiModalUUIDDict,
    complete_mm_data,
    parse_mm_uuids,
    validate_mm_uuids,
)
from mmjax.processing.media.decode_budget import Cancellation, DecodeBudget, split_by_bytes
from mmjax.processing.missing_items import (
    ItemRow,
    admit_items,
    find_missing,
    leave_out_repeats,
    list_rows,
    name_items,
    select_rows,
)
from mmjax.processing.prepared import (
    AnswerParser,
    ItemStore,
    PreparedInputs,
    ProcessedItem,
    ProcessedPrompt,
    ProcessorCache,
)
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
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    argsort_mm_positions,
)
from mmjax.processing.validation import (
    process_and_blame,
    validate_all_applied,
    validate_mm_kwargs,
    validate_mm_placeholders,
    validate_mm_updates,
    validate_placeholder_counts,
    validate_prompt,
    validate_reserved_tokens,
)
from mmjax.system.request_times import measuring


class BaseMultiModalProcessor(ABC, Generic[InfoT]):
    """Processes the requests of one model. One instance serves one thread at a time."""

    requires_tokenizer: ClassVar[bool] = True

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
        self.item_store: ItemStore | None = None
        """Likewise; None: no item outlives this process."""
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
        """Whether the HF processor may update the prompt itself, given its text alone.

        If so, the updated placeholders are looked for in the ids that it returns, and the updates
        are applied here where not all are found; if not, they are applied at once.
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

    def _choose_items(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> MultiModalDataItems:
        """Return what of a request's items its kwargs have processed (a family's hook)."""
        return mm_items

    def _tokenize(
        self,
        prompt: str | list[int],
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> list[int]:
        """Return the prompt's token ids, before any update."""
        if not isinstance(prompt, str):
            return self._apply_hf_processor_tokens_only(list(prompt))
        with measuring("tokenize"):
            return self._tokenize_text(prompt, hf_processor_mm_kwargs, tokenization_kwargs)

    def _tokenize_text(
        self,
        prompt: str,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> list[int]:
        """Return the token ids that the HF processor makes of a text alone.

        One that refuses placeholders without media, or writes something for media that are not
        there, is mended in `_call_hf_processor`, where `mm_data` is empty.
        """
        arguments = (hf_processor_mm_kwargs, tokenization_kwargs)
        (row,) = self._call_hf_processor(prompt, {}, *arguments)["input_ids"]
        return row.tolist() if hasattr(row, "tolist") else list(row)

    def _cached_apply_hf_processor(
        self,
        prompt: str | list[int],
        mm_data_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
        mm_uuids: MultiModalUUIDDict,
    ) -> ProcessedPrompt:
        """Tokenize, and process what the cache lacks; the rest have their updates there.

        A family whose tensors depend on the request's other items calls `_apply_hf_processor` in
        its place for those requests (and names the items accordingly: `_get_hash_kwargs`).
        `mm_uuids`: per modality, what each item is known by: its hash, or what stands for it.
        """
        arguments = (prompt, mm_data_items, hf_processor_mm_kwargs, tokenization_kwargs, mm_uuids)
        if self.cache is None:
            return self._apply_hf_processor(*arguments)
        known, missing = find_missing(self.cache, mm_uuids)
        return self._tokenize_and_process(*arguments, known=known, missing=missing)

    def _apply_hf_processor(
        self,
        prompt: str | list[int],
        mm_data_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
        mm_uuids: MultiModalUUIDDict,
    ) -> ProcessedPrompt:
        """Tokenize, and process all items, without asking a cache."""
        arguments = (prompt, mm_data_items, hf_processor_mm_kwargs, tokenization_kwargs, mm_uuids)
        rows = list_rows(mm_uuids)
        return self._tokenize_and_process(*arguments, known={}, missing=rows)

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
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        mm_kwargs: Mapping[str, object],
        names: MultiModalUUIDDict,
    ) -> AnswerParser | None:
        """Return what parses the answer to a prompt, as it came; None: it is text alone.

        `names`: what caches know the items by.
        """
        return None

    # ---- one request -----------------------------------------------------------------------------

    def apply(
        self,
        prompt: str | list[int],
        mm_data: MultiModalDataDict | MultiModalDataItems | None = None,
        hf_processor_mm_kwargs: Mapping[str, object] | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        **options: Any,
    ) -> MultiModalInputs:
        """Process one request: `prepare`, `commit`, and `rebuild` where the cache lost an item.

        The arguments are those of `prepare`.
        """
        prepared = self.prepare(
            prompt, mm_data, hf_processor_mm_kwargs, tokenization_kwargs, **options
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
        cancellation: Cancellation | None = None,
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
            cancellation: Asked before anything is decoded, and between one batch and the next.
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
        mm_items = self._choose_items(mm_items, mm_kwargs)
        validate_mm_uuids(mm_items, uuids)
        names = {"id_domain": id_domain, "cache_salt": cache_salt, "request_id": request_id}
        factors = self._get_hash_kwargs(mm_items, mm_kwargs)
        hashed = self.item_hasher.identify(mm_items, uuids, factors, **names)
        if cancellation is not None:
            mm_items = mm_items.with_cancellation(cancellation)
        arguments = (own_prompt, mm_items, dict(tokenization_kwargs or {}), hashed.by_modality)
        prepared = process_and_blame(
            lambda kwargs: self._process_prompt(*arguments, kwargs), mm_kwargs
        )
        self.item_hasher.bind(hashed)
        parse = self._get_answer_parser(prompt, mm_items, mm_kwargs, hashed.by_modality)
        prepared = replace(prepared, parse_answer=parse)
        mm_items.drop_decoded()
        if decoders is None:
            return prepared
        return replace(
            prepared,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(as_ids(decoders, self.info.get_tokenizer())),
            encoder_prompt_token_ids=prepared.prompt_token_ids,
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
        fresh = self._process_rows(
            leave_out_repeats(missing), prepared.mm_items, prepared.mm_kwargs
        )
        return replace(prepared, fresh={**prepared.fresh, **fresh})

    # ---- tokenize, process what is missing, apply updates ----------------------------------------

    def _process_prompt(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        tok_kwargs: Mapping[str, object],
        mm_hashes: Mapping[str, list[str]],
        mm_kwargs: Mapping[str, object],
    ) -> PreparedInputs:
        processed = self._cached_apply_hf_processor(
            prompt, mm_items, mm_kwargs, tok_kwargs, mm_uuids=mm_hashes
        )
        may_be_updated = isinstance(prompt, str) and self._hf_processor_applies_updates(
            prompt, mm_items, mm_kwargs, tok_kwargs
        )
        token_ids, placeholders = self._update_prompt(
            processed.token_ids, processed.prompt_updates, mm_items, may_be_updated=may_be_updated
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

    def _tokenize_and_process(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
        mm_hashes: Mapping[str, Sequence[str]],
        *,
        known: Mapping[str, Sequence[ResolvedPromptUpdate]],
        missing: Sequence[ItemRow],
    ) -> ProcessedPrompt:
        """`known`: the updates of the items that are not `missing`, by hash."""
        token_ids = self._tokenize(prompt, mm_kwargs, tok_kwargs)
        token_ids = self.info.frame_prompt(token_ids, mm_items.get_all_counts(), mm_kwargs)
        fresh = self._process_rows(missing, mm_items, mm_kwargs)
        alternatives = {**known, **{mm_hash: updates for mm_hash, (_, updates) in fresh.items()}}
        updates = {
            modality: [
                [self._recompute_cached_prompt_update(one, index) for one in alternatives[mm_hash]]
                for index, mm_hash in enumerate(hashes)
            ]
            for modality, hashes in mm_hashes.items()
        }
        return ProcessedPrompt(token_ids, updates, fresh)

    def _process_rows(
        self,
        rows: Sequence[ItemRow],
        mm_items: MultiModalDataItems,
        mm_kwargs: Mapping[str, object],
    ) -> dict[str, ProcessedItem]:
        """Process items, so many decoded bytes at a time, and return them by hash.

        Whether the request may have all of them is settled before the first is decoded. Each
        batch's pixels are forgotten after it.
        """
        sizes = admit_items(rows, mm_items, self._max_request_bytes)
        cancellation = mm_items.cancellation
        keys = self._name_on_disk(rows, mm_items)
        fresh = self._load_items(rows, keys, mm_items, mm_kwargs)
        missing = [pair for pair in zip(rows, sizes, strict=True) if pair[0].mm_hash not in fresh]
        for batch, num_bytes in split_by_bytes(missing):
            cancellation.check()
            with self.decode_budget.hold(num_bytes, cancellation, on_wait=mm_items.drop_decoded):
                selected = select_rows(mm_items, batch)
                processed = self._process_items(selected, mm_kwargs)
                fresh |= name_items(batch, processed, owns_arrays=self.cache is not None)
                selected.drop_decoded()
        if self.item_store is not None:
            for row, _ in missing:
                if row in keys:
                    self.item_store.save(keys[row], fresh[row.mm_hash][0])
        return fresh

    def _name_on_disk(
        self, rows: Sequence[ItemRow], mm_items: MultiModalDataItems
    ) -> dict[ItemRow, bytes]:
        """Return the items' keys on disk; none where nothing is kept, or embeddings came."""
        if self.item_store is None or mm_items.get_passthrough_data():
            return {}
        items = {row: mm_items[row.modality].get_item_for_hash(row.place) for row in rows}
        return {row: self.item_hasher.name_on_disk(row.mm_hash, one) for row, one in items.items()}

    def _load_items(
        self,
        rows: Sequence[ItemRow],
        keys: Mapping[ItemRow, bytes],
        mm_items: MultiModalDataItems,
        mm_kwargs: Mapping[str, object],
    ) -> dict[str, ProcessedItem]:
        """Return the items that are on disk, by hash; their updates are made of their tensors."""
        if self.item_store is None:
            return {}
        loaded = {row: self.item_store.load(keys[row]) for row in rows if row in keys}
        found = {row: item for row, item in loaded.items() if item is not None}
        if not found:
            return {}
        selected = select_rows(mm_items, found)
        by_modality: dict[str, list[MultiModalKwargsItem]] = {}
        for row, item in found.items():
            by_modality.setdefault(row.modality, []).append(item)
        counts = {modality: len(items) for modality, items in by_modality.items()}
        kwargs = MultiModalKwargsItems(by_modality)
        processed = self._resolve_items(selected, kwargs, mm_kwargs, counts)
        return name_items([*found], processed, owns_arrays=False)

    def _process_items(
        self, mm_items: MultiModalDataItems, mm_kwargs: Mapping[str, object]
    ) -> dict[str, list[ProcessedItem]]:
        """Return each item's tensors and prompt updates; dummy text satisfies the HF processor."""
        counts = {m: n for m, n in mm_items.get_all_counts().items() if n}
        with measuring("decode"):
            data_by_modality = {m: mm_items[m].get_processor_data() for m in counts}
        mm_data = {key: one for data in data_by_modality.values() for key, one in data.items()}
        tensors: dict[str, Any] = {}
        if mm_data:
            text = self.dummy_inputs.get_dummy_text(
                {m: counts[m] for m, data in data_by_modality.items() if data}
            )
            tensors |= self._call_hf_processor(text, mm_data, mm_kwargs, {})
        # The user may write into an array later: what a cache keeps of it must not change.
        for key, data in mm_items.get_passthrough_data().items():
            tensors[key] = tensors_as_numpy(data, copy=True)
        return self._split_into_items(mm_items, BatchFeature(tensors), mm_kwargs, counts)

    def _split_into_items(
        self,
        mm_items: MultiModalDataItems,
        tensors: BatchFeature,
        mm_kwargs: Mapping[str, object],
        counts: Mapping[str, int],
    ) -> dict[str, list[ProcessedItem]]:
        """Divide the HF processor's batch, and resolve each item's prompt updates."""
        fields = {
            **self._get_mm_fields_config(tensors, mm_kwargs),
            **{
                key: MultiModalFieldConfig.shared(m, counts[m])
                for m, key in AFFINE_KEYS.items()
                if m in counts
            },
        }
        kwargs = MultiModalKwargsItems.from_hf_inputs(tensors, fields)
        return self._resolve_items(mm_items, kwargs, mm_kwargs, counts)

    def _resolve_items(
        self,
        mm_items: MultiModalDataItems,
        kwargs: MultiModalKwargsItems,
        mm_kwargs: Mapping[str, object],
        counts: Mapping[str, int],
    ) -> dict[str, list[ProcessedItem]]:
        """Give each item its prompt update, resolved."""
        validate_mm_kwargs(kwargs, counts)
        updates = resolve_updates(self._get_prompt_updates(mm_items, mm_kwargs, kwargs), counts)
        validate_mm_updates(updates, counts)
        return {
            m: [(kwargs.get_item(m, i), alternatives) for i, alternatives in enumerate(updates[m])]
            for m in counts
        }

    def _update_prompt(
        self,
        token_ids: list[int],
        updates: MultiModalPromptUpdates,
        mm_items: MultiModalDataItems,
        *,
        may_be_updated: bool,
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        """Find the updated placeholders where the HF processor wrote them; else write them."""
        counts = {m: n for m, n in mm_items.get_all_counts().items() if n}
        if not counts:
            return token_ids, {}
        if may_be_updated:
            placeholders = self._find_mm_placeholders(token_ids, updates)
            if all(len(placeholders.get(m, ())) == n for m, n in counts.items()):
                return token_ids, placeholders
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


class EncDecMultiModalProcessor(BaseMultiModalProcessor[InfoT]):
    """Of encoder-decoder models, whose media stand in the encoder's prompt.

    Makes two prompts of one, or takes two.
    """

    @abstractmethod
    def create_encoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> str | list[int]:
        """Return the encoder's prompt, placeholders not yet expanded."""

    def create_decoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> str | list[int]:
        """Return the decoder's prompt, where the caller gives none."""
        return prompt

    def _create_prompts(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        decoder_prompt: str | list[int] | None,
    ) -> tuple[str | list[int], str | list[int]]:
        """Return both prompts: HF and the prompt updates work on the encoder's alone.

        `prompt` is the encoder's where `decoder_prompt` is given too; else both are made of it.
        The decoder's is tokenized without special tokens.
        """
        if decoder_prompt is None:
            decoder_prompt = self.create_decoder_prompt(prompt, mm_items)
        else:
            validate_prompt(decoder_prompt, self.info.vocab_size, param="decoder_prompt")
        return self.create_encoder_prompt(prompt, mm_items), decoder_prompt
