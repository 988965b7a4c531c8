"""Admission of requests: the tensors of their items, and checks.

A request that passes can always be computed to its end, if alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmjax.cache import BaseMultiModalReceiverCache
from mmjax.cache.kv.block_hash import PlacedItem
from mmjax.engine.scheduling.request import NUM_MASKED, EncoderItem, Request
from mmjax.errors import (
    MediaIdConflictError,
    MultiModalCacheMissError,
    RequestRuntimeError,
    RequestValueError,
)
from mmjax.models.host_inputs import EncoderSpec, PackedEncoderSpec, Sees
from mmjax.params.sampling_params import MAX_BAD_WORD_SEQUENCES, MAX_STOP_TOKEN_IDS
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from mmjax.rounding import cdiv
from mmjax.transport.messages import EngineCoreRequest


def resolve_features(
    features: Sequence[MultiModalFeatureSpec], cache: BaseMultiModalReceiverCache | None
) -> list[MultiModalFeatureSpec]:
    """Fill in tensors that were not sent, from P1's cache or an earlier item of the request.

    Raises MultiModalCacheMissError with the hashes of all that are missing; sent ones are cached.
    """
    resolved = list(features if cache is None else cache.get_and_update_features(features))
    first: dict[str, MultiModalKwargsItem] = {}
    missing: dict[str, None] = {}
    for feature in resolved:
        key = feature.mm_hash or feature.identifier
        item = first.get(key) if feature.data is None else feature.tensors
        feature.data = item
        if item is None:
            missing[key] = None
        else:
            first.setdefault(key, item)
    if missing:
        raise MultiModalCacheMissError(list(missing))
    return resolved


def check_places(features: Sequence[MultiModalFeatureSpec]) -> None:
    """Raise RequestRuntimeError unless items are sorted and no position takes two embeddings.

    Ranges may overlap in positions without embeddings: a tokenizer may merge tokens there.
    """
    last_offset, first_free = 0, 0
    for feature in features:
        position = feature.mm_position
        if position.offset < last_offset:
            raise RequestRuntimeError(
                f"an item at {position.offset} comes after one at {last_offset}; items must be "
                "sorted by their place in the prompt",
                param="multi_modal_data",
            )
        last_offset = position.offset
        runs = position.extract_embeds_range()
        if runs and runs[0][0] < first_free:
            raise RequestRuntimeError(
                f"place {runs[0][0]} of the prompt takes embeddings of two items; "
                "placeholders must not overlap",
                param="multi_modal_data",
            )
        first_free = max([first_free, *(last + 1 for _, last in runs)])


def check_shapes(
    identifier: str,
    arrays: Mapping[str, np.ndarray],
    spec: EncoderSpec | PackedEncoderSpec,
) -> int:
    """Return how many embeddings the arrays give; `RequestRuntimeError` for other shapes."""
    unit = "patch" if isinstance(spec, PackedEncoderSpec) else "unit"
    counts = set()
    for name, (shape, _) in spec.inputs.items():
        if arrays[name].ndim == 0 or arrays[name].shape[1:] != tuple(shape):
            raise RequestRuntimeError(
                f"`{name}` of item {identifier} has shape {arrays[name].shape}; "
                f"each {unit} must have shape {tuple(shape)}",
                param="multi_modal_data",
            )
        counts.add(len(arrays[name]))
    if len(counts) > 1:
        raise RequestRuntimeError(
            f"the inputs of item {identifier} have {sorted(counts)} {unit} rows; all must "
            "have as many",
            param="multi_modal_data",
        )
    if isinstance(spec, EncoderSpec):
        return counts.pop() * spec.tokens_per_unit
    num_outputs, rest = divmod(counts.pop(), spec.patches_per_token)
    if rest:
        raise RequestRuntimeError(
            f"item {identifier} has patches that do not fill an embedding, which takes "
            f"{spec.patches_per_token}",
            param="multi_modal_data",
        )
    return num_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The engine's limits on a single request."""

    max_model_len: int
    num_token_ids: int
    vocab_size: int
    """Tokens that have a logit, and so can be sampled."""
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    encoder_budget: int
    """The smaller of what one step may encode and what the encoder cache holds, in embeddings."""
    keeps_runs_whole: bool
    """Whether a run of embeddings must be computed in one step."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps."""
    sees: Sees = "past"
    """What a prompt's tokens see."""
    max_encoder_len: int = 0
    """Hidden states of an encoder-decoder model's longest encoder input; 0: decoder only."""
    has_states: bool = False
    """Whether the model has recurrent layers."""
    item_sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Units, or patches, of the calls that encode items, here or elsewhere, by function."""
    aligns: bool = False
    """Whether the model has heads that align a text with an encoder's states."""

    def check_prompt(self, token_ids: Sequence[int], items: Sequence[EncoderItem]) -> None:
        """Raise `RequestValueError` for a prompt that cannot be computed."""
        if not token_ids:
            raise RequestValueError("the prompt is empty; give at least one token", param="prompt")
        if len(token_ids) >= self.max_model_len:
            raise RequestValueError(
                f"the prompt has {len(token_ids)} tokens; the model's context of "
                f"{self.max_model_len} must also hold one new token: shorten the prompt",
                param="prompt",
            )
        self._check_vocabulary(token_ids, items)
        for item in items:
            self._check_item(item, len(token_ids))
        if self.sees == "prompt" and len(token_ids) > self.max_num_batched_tokens:
            raise RequestValueError(
                f"the prompt has {len(token_ids)} tokens, which see each other and so are computed "
                f"in one step; a step holds {self.max_num_batched_tokens}: shorten the prompt, or "
                "raise `max_num_batched_tokens`",
                param="prompt",
            )
        if self.sees == "all_items":
            self._check_range(items)
        if not self.enable_chunked_prefill or self.sees in ("all_items", "prompt"):
            self._check_items_of_one_step(items)

    def check_encoder_prompt(
        self, token_ids: Sequence[int] | None, items: Sequence[PlacedItem]
    ) -> Sequence[int]:
        """Return the encoder's prompt of a request; `RequestValueError` if it is invalid."""
        if token_ids is None:
            raise RequestValueError(
                "the request has no encoder's prompt, but the model is an encoder-decoder; add one",
                param="encoder_prompt",
            )
        if not token_ids:
            raise RequestValueError(
                "the encoder's prompt is empty; give at least one token", param="prompt"
            )
        if len(token_ids) > self.max_encoder_len:
            raise RequestValueError(
                f"the encoder's prompt has {len(token_ids)} tokens; the model's encoder reads "
                f"{self.max_encoder_len}: shorten the prompt",
                param="prompt",
            )
        self._check_vocabulary(token_ids, items)
        for item in items:
            _check_place(item, len(token_ids))
        num_embeds = len(token_ids) + _count_embeds(items)
        if num_embeds > self.encoder_budget:
            raise RequestValueError(
                f"the encoder's prompt of {len(token_ids)} tokens and its items give {num_embeds} "
                f"embeddings, which are computed in one step; a step computes "
                f"{self.encoder_budget}: send fewer items, or raise `max_num_encoder_input_tokens` "
                "and `encoder_cache_size`",
                param="prompt",
            )
        return token_ids

    def check_sampling(self, message: EngineCoreRequest) -> None:
        """Raise `RequestError` for token ids that no logit has, or parts that P0 left out."""
        params = message.sampling_params
        listed = {
            "logit_bias": list(params.logit_bias or ()),
            "allowed_token_ids": list(params.allowed_token_ids or ()),
            "bad_words": [token_id for word in message.bad_words_token_ids for token_id in word],
            "output_token_ids": message.output_token_ids,
            "transcript": () if params.transcript is None else params.transcript.token_ids,
        }
        for name, token_ids in listed.items():
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
                raise RequestValueError(
                    f"`{name}` holds a token that the model cannot give; ids lie in "
                    f"[0, {self.vocab_size - 1}]",
                    param=name,
                )
        words = message.bad_words_token_ids
        if len(words) > MAX_BAD_WORD_SEQUENCES or not all(words):
            raise RequestValueError(
                f"`bad_words` stand for {len(words)} sequences of tokens; give at most "
                f"{MAX_BAD_WORD_SEQUENCES}, none of them empty",
                param="bad_words",
            )
        is_complete = bool(params.bad_words) <= bool(words) and (
            (params.structured_outputs is None) == (message.grammar is None)
        )
        if not is_complete:
            raise RequestRuntimeError(
                "the request's sampling parameters come without the tokens or the grammar that P0 "
                "makes of them",
                param="sampling_params",
            )

    def check_request(self, request: Request) -> None:
        """Raise `RequestValueError` for a request that cannot be served to its end."""
        self._check_alignment(request)
        if request.num_output_tokens >= max(request.max_tokens, 1):
            raise RequestValueError(
                f"the request has {request.num_output_tokens} tokens already, and ends after "
                f"{request.max_tokens}; there is nothing left to generate",
                param="output_token_ids",
            )
        # The last sampled token is not computed.
        num_slots = request.num_prompt_tokens + request.max_tokens - 1
        num_blocks = cdiv(num_slots, self.block_size) + cdiv(request.encoder_len, self.block_size)
        if num_blocks > self.num_blocks:
            encoder = f" beside {request.encoder_len} encoder states" if request.encoder else ""
            raise RequestValueError(
                f"the request may grow to {num_slots} tokens{encoder}, which need {num_blocks} "
                f"blocks of the KV cache; it has {self.num_blocks}: lower `max_tokens`, shorten "
                "the prompt, or raise `kv_cache_memory_bytes`",
                param="max_tokens",
            )
        num_held_back, limit = len(request.held_back_token_ids), MAX_STOP_TOKEN_IDS + NUM_MASKED
        if num_held_back > limit:
            raise RequestValueError(
                f"`min_tokens` with {num_held_back} ids that end the text, the model's own among "
                f"them; at most {limit} can be held back: shorten `stop_token_ids`",
                param="stop_token_ids",
            )

    def _check_alignment(self, request: Request) -> None:
        wanted = request.sampling_params.alignment
        if wanted is None:
            return
        if not self.aligns:
            raise RequestValueError.about(
                "alignment",
                "is asked for, and the model has no heads that align; leave it out",
            )
        is_within = 0 <= wanted.first_token < request.num_prompt_tokens
        if not is_within or not 1 <= wanted.num_states <= request.encoder_len:
            raise RequestValueError.about(
                "alignment",
                f"is of the tokens from {wanted.first_token} on and {wanted.num_states} states; "
                f"the prompt has {request.num_prompt_tokens} tokens, and its encoder's "
                f"{request.encoder_len} states",
            )

    def _check_vocabulary(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> None:
        ids = np.asarray(token_ids, np.int64)
        is_text = np.ones(len(ids), bool)
        for item in items:
            for first, last in item.mm_position.extract_embeds_range():
                is_text[first : last + 1] = False
        unknown = ids[is_text & ((ids < 0) | (ids >= self.num_token_ids))]
        if unknown.size:
            raise RequestValueError(
                f"token id {unknown[0]} is not in the vocabulary; ids lie in "
                f"[0, {self.num_token_ids - 1}]",
                param="prompt_token_ids",
            )

    def _check_items_of_one_step(self, items: Sequence[EncoderItem]) -> None:
        num_embeds = _count_embeds(items)
        if num_embeds > self.encoder_budget:
            has_several = self.sees not in ("all_items", "prompt")
            why = "without chunked prefill" if has_several else "since they see each other"
            raise RequestValueError(
                f"the prompt's items give {num_embeds} embeddings, which must be computed in one "
                f"step {why}; a step computes {self.encoder_budget}: send fewer items, or raise "
                "`max_num_encoder_input_tokens` and `encoder_cache_size`",
                param="multi_modal_data",
            )

    def _check_range(self, items: Sequence[EncoderItem]) -> None:
        runs = [run for item in items for run in item.mm_position.extract_embeds_range()]
        num_tokens = max(run[1] for run in runs) + 1 - min(run[0] for run in runs) if runs else 0
        if num_tokens > self.max_num_batched_tokens:
            raise RequestValueError(
                f"the prompt has {num_tokens} tokens from its first item's to its last one's, "
                "which see each other and so are computed in one step; a step holds "
                f"{self.max_num_batched_tokens}: send fewer or smaller items, or raise "
                "`max_num_batched_tokens`",
                param="multi_modal_data",
            )

    def _check_item(self, item: EncoderItem, num_prompt_tokens: int) -> None:
        _check_place(item, num_prompt_tokens)
        self.check_num_embeds(item)
        if not self.keeps_runs_whole:
            return
        longest = item.mm_position.get_longest_run()
        if longest > self.max_num_batched_tokens:
            raise RequestValueError(
                f"an item has a run of {longest} embeddings, which this engine computes in one "
                f"step; a step holds {self.max_num_batched_tokens}: use a smaller picture, or "
                "raise `max_num_batched_tokens`",
                param="multi_modal_data",
            )

    def check_num_embeds(self, item: EncoderItem) -> None:
        """Raise `RequestValueError` for an item that exceeds `encoder_budget`."""
        if item.num_embeds > self.encoder_budget:
            raise RequestValueError(
                f"an item gives {item.num_embeds} embeddings; the encoder cache holds "
                f"{self.encoder_budget}: use a smaller picture, or raise "
                "`max_num_encoder_input_tokens` and `encoder_cache_size`",
                param="multi_modal_data",
            )


def _count_embeds(items: Sequence[PlacedItem]) -> int:
    """Return how many embeddings items take together; equal ones are encoded once."""
    sizes = {item.identifier: item.mm_position.get_num_embeds() for item in items}
    return sum(sizes.values())


def _check_place(item: PlacedItem, num_prompt_tokens: int) -> None:
    start = item.mm_position.offset
    end = start + item.mm_position.length
    if start < 0 or end > num_prompt_tokens:
        raise RequestValueError(
            f"item {item.identifier} lies at [{start}, {end}) of a prompt of "
            f"{num_prompt_tokens} tokens; placeholders must lie in the prompt",
            param="multi_modal_data",
        )


class ItemSizes:
    """Number of embeddings by identifier, of all unfinished requests; refuses contradictions."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, int]] = {}
        """identifier -> (embeddings, items that have it)."""

    def add(self, items: Sequence[EncoderItem]) -> None:
        """Add a request's items; `MediaIdConflictError`, without a change, on a conflict."""
        sizes: dict[str, int] = {}
        for item in items:
            in_flight = self._entries.get(item.identifier, (item.num_embeds, 0))[0]
            known = sizes.setdefault(item.identifier, in_flight)
            if known != item.num_embeds:
                raise MediaIdConflictError(
                    f"the media id {item.identifier} stands for {known} embeddings elsewhere and "
                    f"for {item.num_embeds} here; give other content another id",
                    param="multi_modal_uuids",
                )
        for item in items:
            _, count = self._entries.get(item.identifier, (0, 0))
            self._entries[item.identifier] = (item.num_embeds, count + 1)

    def remove(self, items: Sequence[EncoderItem]) -> None:
        """Remove a request's items."""
        for item in items:
            num_embeds, count = self._entries.pop(item.identifier)
            if count > 1:
                self._entries[item.identifier] = (num_embeds, count - 1)


def check_is_served(
    message: EngineCoreRequest, *, has_encoder: bool, has_adapters: bool, pools: bool
) -> None:
    """Raise RequestError for a request that this engine has no means for."""
    if (message.sampling_params.pooling is not None) != pools:
        runner = "pooling" if pools else "generate"
        raise RequestRuntimeError(
            f"the request is for {'text' if pools else 'vectors'}, but the engine's `runner` is "
            f"'{runner}'; P0 refuses such requests",
            param="pooling",
        )
    if message.sampling_params.seed is None and not message.sampling_params.is_greedy:
        raise RequestRuntimeError(
            "the request is sampled and brings no `seed`; expected the one that P0 draws where its "
            "client gives none",
            param="seed",
        )
    if message.lora_name is not None and not has_adapters:
        raise RequestValueError(
            f"`lora_name` is {message.lora_name!r}, but this engine serves no adapters; leave it "
            "out, or start the engine with `enable_lora`",
            param="lora_name",
        )
    if message.encoder_prompt_token_ids is not None and not has_encoder:
        raise RequestValueError(
            "the request has an encoder's prompt, but the model is a decoder alone; leave it out",
            param="encoder_prompt",
        )
