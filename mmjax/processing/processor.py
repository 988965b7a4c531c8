"""Prompt and media -> token ids with placeholders, and the items' tensors: the flow of every model.

A family subclasses `BaseMultiModalProcessor` and overrides `_get_mm_fields_config` and
`_get_prompt_updates`. Knows no cache but through `ProcessorCache`, and no engine.

A request is processed in two steps. `prepare` does the work, and changes no cache. `commit` is
short, and the only place where the cache changes: who sends the result to the engine holds a lock
around both, so that the engine sees requests in the order of their commits.

A text prompt goes to the HF processor: without a cache together with its media, with a cache
alone. Token ids do not: `_apply_hf_processor_tokens_only` does to them what HF does to any text.
With a cache, or with token ids, the media go alone (with dummy text, in batches of the items that
the cache lacks). Where HF has written the updated placeholders they are found in the prompt; where
not, the updates are applied here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from mmjax.errors import ConfigError, MultiModalCacheMissError, RequestValueError
from mmjax.processing.commit import ProcessorCache
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder
from mmjax.processing.faults import blaming_settings, find_fault
from mmjax.processing.hashing.item_hashes import ItemHasher
from mmjax.processing.hooks import InfoT
from mmjax.processing.item_processing import ItemProcessing, ProcessedPrompt
from mmjax.processing.items.parse import (
    MultiModalDataDict,
    MultiModalDataItems,
    MultiModalUUIDDict,
    parse_mm_uuids,
    validate_mm_uuids,
)
from mmjax.processing.items.uuids import complete_mm_data
from mmjax.processing.media.decode_budget import DecodeControl
from mmjax.processing.prepared import PreparedInputs
from mmjax.processing.prompt_updates.updates import PlaceholderFeaturesInfo
from mmjax.processing.tensors.inputs import (
    ItemData,
    MultiModalInputs,
    MultiModalKwargsItems,
    argsort_mm_positions,
)
from mmjax.processing.tensors.shared_item import SharedItem
from mmjax.processing.validation import (
    validate_limited_modalities,
    validate_mm_placeholders,
    validate_num_embeds,
    validate_placeholder_counts,
    validate_prompt,
    validate_reserved_tokens,
)


class BaseMultiModalProcessor(ItemProcessing[InfoT]):
    """Processes the requests of one model. One instance serves one thread at a time."""

    requires_tokenizer: ClassVar[bool] = True

    def __init__(
        self,
        info: InfoT,
        dummy_inputs: BaseDummyInputsBuilder[InfoT],
        *,
        cache: ProcessorCache | None = None,
    ) -> None:
        super().__init__(info, dummy_inputs, cache=cache)
        if self.requires_tokenizer and info.ctx.tokenizer is None:
            raise ConfigError(
                f"{type(self).__name__} works with text, and there is no tokenizer; give one"
            )
        mm = info.ctx.get_mm_config()
        self.item_hasher = ItemHasher(info.model_id, mm.mm_hasher_algorithm)
        """Processors of one model may share one, and with it what is known of encoded media."""

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
        if decoder_prompt is not None:
            raise RequestValueError(
                "decoder_prompt is given, but this model has no encoder; leave it out",
                param="decoder_prompt",
            )
        validate_prompt(prompt, self.info.vocab_size)
        mm_items = self._to_mm_items(mm_data, mm_uuids)
        validate_placeholder_counts(self.info, prompt, mm_items.get_all_counts())
        mm_kwargs = dict(hf_processor_mm_kwargs or {})
        self.info.check_mm_kwargs(mm_kwargs)
        uuids = parse_mm_uuids(mm_uuids)
        validate_mm_uuids(mm_items, uuids)
        names = {"id_domain": id_domain, "cache_salt": cache_salt, "request_id": request_id}
        factors = self._get_hash_kwargs(mm_items, mm_kwargs)
        hashed = self.item_hasher.identify(mm_items, uuids, factors, **names)
        if control is not None:
            mm_items = mm_items.with_control(control)

        def process(kwargs: Mapping[str, object]) -> PreparedInputs:
            return self._prepare(
                prompt, mm_items, kwargs, dict(tokenization_kwargs or {}), hashed.by_modality
            )

        try:
            prepared = process(mm_kwargs)
        except Exception as error:  # HF's code and families' may raise anything
            blamed = find_fault(error, mm_kwargs, lambda: process({}))
            if blamed is error:
                raise
            raise blamed from error
        self.item_hasher.bind(hashed)
        mm_items.drop_decoded()
        return prepared

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
        places = argsort_mm_positions(prepared.mm_placeholders)
        hashes = [prepared.mm_hashes[modality][index] for modality, index in places]
        if self.cache is None:
            rows: list[ItemData | None] = [prepared.fresh[h][0] for h in hashes]
        else:
            given = [prepared.fresh.get(mm_hash) for mm_hash in hashes]
            rows = [item for item, _ in self.cache.get_and_update(given, hashes)]
        return _to_inputs(prepared, dict(zip(places, rows, strict=True)))

    def rebuild(self, prepared: PreparedInputs, mm_hashes: Sequence[str]) -> PreparedInputs:
        """Make items fresh again, from their media; RequestError where only a uuid was given."""
        wanted = set(mm_hashes) - prepared.fresh.keys()
        rows: dict[str, dict[str, int]] = {}
        for modality, hashes in prepared.mm_hashes.items():
            for index, mm_hash in enumerate(hashes):
                if mm_hash in wanted:
                    rows.setdefault(modality, {}).setdefault(mm_hash, index)
        # It was admitted before; whether it is still wanted counts on.
        control = DecodeControl(prepared.mm_items.control.cancellation)
        mm_items = prepared.mm_items.with_control(control)
        fresh = self._process_missing(rows, mm_items, prepared.mm_kwargs)
        return replace(prepared, fresh={**prepared.fresh, **fresh})

    def _to_mm_items(
        self,
        mm_data: MultiModalDataDict | MultiModalDataItems | None,
        mm_uuids: MultiModalUUIDDict | None,
    ) -> MultiModalDataItems:
        if isinstance(mm_data, MultiModalDataItems):
            return mm_data
        return self.info.parse_mm_data(complete_mm_data(mm_data or {}, mm_uuids))

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
        counts = {modality: n for modality, n in mm_items.get_all_counts().items() if n}
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

    def get_mm_max_tokens_per_item(self, seq_len: int = 0) -> Mapping[str, int]:
        """Return the most embeddings of an item: as the model declares, or measured."""
        allowed = self.info.allowed_mm_limits
        counts = {m: 1 for m, limit in allowed.items() if limit or self.info.takes_embeds}
        declared = self.info.get_mm_max_tokens_per_item(seq_len, counts)
        if declared is None:
            return self.measure_mm_max_tokens_per_item(seq_len, counts)
        described = self._measure_described(seq_len)
        return {m: min(declared[m], described.get(m, declared[m])) for m in counts}

    def _measure_described(self, seq_len: int) -> Mapping[str, int]:
        """Return the embeddings of the items whose sizes `limit_mm_per_prompt` gives."""
        mm = self.info.ctx.get_mm_config()
        described = {
            modality: 1
            for modality, limit in self.info.allowed_mm_limits.items()
            if mm.media_options(modality) and (limit or self.info.takes_embeds)
        }
        return self.measure_mm_max_tokens_per_item(seq_len, described)

    @cached_property
    def _described_tokens(self) -> Mapping[str, int]:
        return self._measure_described(self.info.ctx.model_config.max_model_len)

    def validate_item_sizes(self, prepared: PreparedInputs) -> None:
        """Refuse an item with more embeddings than one of the size that the operator described."""
        validate_num_embeds(self.info, prepared.mm_placeholders, self._described_tokens)

    def check_settings(self) -> None:
        """Process the largest input once: ConfigError for settings that HF refuses."""
        validate_limited_modalities(self.info)
        self.info.get_hf_processor()
        counts = {m: 1 for m, limit in self.info.allowed_mm_limits.items() if limit}
        self.measure_mm_max_tokens_per_item(self.info.ctx.model_config.max_model_len, counts)

    def measure_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """Process the dummy inputs, and count the embeddings of the largest item."""
        if not mm_counts:
            return {}
        ranges_by_modality = self._prepare_dummies(seq_len, mm_counts).mm_placeholders
        return {
            modality: max(placeholder.get_num_embeds() for placeholder in ranges)
            for modality, ranges in ranges_by_modality.items()
        }

    def get_dummy_mm_inputs(
        self, mm_counts: Mapping[str, int], *, max_num_batched_tokens: int | None = None
    ) -> MultiModalInputs:
        """Return the largest input with these items, its prompt filled up with token 0.

        As long as the model's longest prompt, or as one step of chunked prefill where
        `max_num_batched_tokens` says how much that takes. Leaves the cache as it is.
        """
        seq_len = self.info.ctx.model_config.max_model_len
        if max_num_batched_tokens is not None:
            seq_len = min(seq_len, max_num_batched_tokens)
        prepared = self._prepare_dummies(seq_len, mm_counts)
        places = argsort_mm_positions(prepared.mm_placeholders)
        # A white picture may be held from a request: dummies come with their tensors.
        prepared = self.rebuild(prepared, [prepared.mm_hashes[m][index] for m, index in places])
        prompt_token_ids = list(prepared.prompt_token_ids)
        prompt_token_ids += [0] * (seq_len - len(prompt_token_ids))
        return _to_inputs(
            replace(prepared, prompt_token_ids=prompt_token_ids),
            {(m, index): prepared.fresh[prepared.mm_hashes[m][index]][0] for m, index in places},
        )

    def _prepare_dummies(self, seq_len: int, mm_counts: Mapping[str, int]) -> PreparedInputs:
        with blaming_settings(self.info.ctx.get_mm_config()):
            inputs = self.dummy_inputs.get_dummy_processor_inputs(seq_len, mm_counts)
            return self.prepare(
                inputs.prompt,
                self.info.parse_mm_data(inputs.mm_data, validate=False),
                hf_processor_mm_kwargs=inputs.hf_processor_mm_kwargs,
            )


def _to_inputs(
    prepared: PreparedInputs, items: Mapping[tuple[str, int], ItemData | None]
) -> MultiModalInputs:
    tensors = {place: item for place, item in items.items() if not isinstance(item, SharedItem)}
    return MultiModalInputs(
        prompt_token_ids=prepared.prompt_token_ids,
        encoder_prompt_token_ids=prepared.encoder_prompt_token_ids,
        mm_kwargs=MultiModalKwargsItems(
            {
                modality: [tensors.get((modality, index)) for index in range(len(hashes))]
                for modality, hashes in prepared.mm_hashes.items()
            }
        ),
        shared_items={place: item for place, item in items.items() if isinstance(item, SharedItem)},
        mm_hashes=prepared.mm_hashes,
        mm_placeholders=prepared.mm_placeholders,
        prompt=prepared.prompt,
    )
