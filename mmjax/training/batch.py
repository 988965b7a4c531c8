"""Prompts with their answers, as arrays of one padded batch: made on the host, in numpy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from mmjax.engine.device.encoder import (
    TEXT_ROW,
    EncoderRows,
    Encoders,
    PromptCall,
    PromptCalls,
    patch_buckets,
)
from mmjax.engine.device.mesh import Placement
from mmjax.engine.scheduling.request import EncoderItem, Request
from mmjax.layers.attention.segments import BLOCK_SIZE
from mmjax.models.host_inputs import AHEAD, EncoderSpec, HostInputs, PackedEncoderSpec, Sees
from mmjax.processing.tensors.inputs import MultiModalInputs
from mmjax.rounding import round_up
from mmjax.training.samples import Sample, make_request, make_sample

_LEAST_TOKENS = 16
_LEAST_ANSWER = 8
_STEPS = 8
"""Sizes are multiples of this part of the next power of two: four to each doubling."""


class EncoderInputs(NamedTuple):
    """What `encode` is given: units, or patches, of a batch's items for one encoder, each once."""

    inputs: Mapping[str, Any]
    """By name, arrays as `encode` takes them."""
    dst_rows: Any
    """int32[outputs]: rows of the pool; padding: out of range."""


class PromptInputs(NamedTuple):
    """What an encoder-decoder's encoder is given, and where its states are read."""

    call: PromptCall
    """Of each prompt once."""
    state_rows: Any
    """int32[B, S]: rows of the pool, of each sequence's hidden states; padding: -1."""
    seen: Any
    """int32[B, 2, T]: as in `CrossAttentionMetadata`; None: all tokens attend to all."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ScoreBatch:
    """`B` prompts with their answers, padded at the end to `T` tokens, and answers to `A`.

    A pytree, whose fields are of no types of arrays, since JAX makes it of what stands for them,
    too. Whether an optional field is None is part of the program.
    """

    token_ids: Any
    """int32[B, T]: prompt, then answer."""
    lengths: Any
    """int32[B]: tokens of both."""
    positions: Any
    """int32[B, 3, T]: of the rotary angles."""
    src_index: Any
    """int32[B, T]: row of the pool, of an item's embedding; -1 for text."""
    span_end: Any
    """int32[B, T]: as in `PagedAttentionMetadata`, but 0 for a causal token; None: all are."""
    answer_ids: Any
    """int32[B, A]"""
    answer_starts: Any
    """int32[B]: position of an answer's first token, the length of its prompt."""
    encoders: tuple[EncoderInputs, ...]
    """Of each encoder that a prompt has an item for."""
    prompts: PromptInputs | None
    """None for a decoder alone."""
    num_pool_rows: int = field(metadata={"static": True})
    """Of the pool of the encoders' outputs."""

    @property
    def answer_mask(self) -> Any:
        """bool[B, A]: which of `answer_ids` are an answer's tokens, and no padding."""
        places = np.arange(self.answer_ids.shape[1], dtype=np.int32)
        return places[None, :] < (self.lengths - self.answer_starts)[:, None]


def round_size(number: int, least: int = 1) -> int:
    """Round up to one of few sizes, at most a quarter larger: 1, ..., 8, 10, 12, 14, 16, 20."""
    number = max(number, 1)
    return round_up(number, max(least, (1 << (number - 1).bit_length()) // _STEPS))


class BatchMaker:
    """Makes a model's batches."""

    def __init__(self, host_inputs: HostInputs, *, sees: Sees, max_encoder_len: int) -> None:
        """`max_encoder_len`: as of `MultiModalModel`."""
        self._host_inputs = host_inputs
        self._sees: Sees = sees
        self._max_encoder_len = max_encoder_len

    @property
    def num_extra_rows(self) -> int:
        """Rows at the pool's end that are the model's learned embeddings."""
        return self._host_inputs.num_extra_rows

    def make(self, pairs: Sequence[tuple[MultiModalInputs | Sample, Sequence[int]]]) -> ScoreBatch:
        """Return the batch of prompts and the token ids of their answers.

        Items of one hash are encoded once. ValueError for no prompt, an empty one, and an item that
        is given by its embeddings.
        """
        requests = [self._make_request(number, *pair) for number, pair in enumerate(pairs)]
        if not requests or any(request.num_prompt_tokens == 0 for request in requests):
            raise ValueError("a batch needs prompts, each with a token at least")
        num_tokens = round_size(max(one.num_tokens for one in requests), _LEAST_TOKENS)
        rows, encoders, prompts = self._encode(requests, num_tokens)
        answer_len = round_size(max(one.num_output_tokens for one in requests), _LEAST_ANSWER)
        shape = (len(requests), num_tokens)
        token_ids, positions = (
            np.zeros(shape, np.int32),
            np.zeros((shape[0], 3, shape[1]), np.int32),
        )
        src_index, span_end = np.full(shape, TEXT_ROW, np.int32), np.zeros(shape, np.int32)
        answer_ids = np.zeros((shape[0], answer_len), np.int32)
        for row, request in enumerate(requests):
            length = request.num_tokens
            token_ids[row, :length] = request.known_token_ids
            indices = np.arange(length, dtype=np.int32)
            rotary = request.rotary
            positions[row, :, :length] = indices if rotary is None else rotary.between(0, length)
            ends = request.spans.ends
            span_end[row, : len(ends)] = ends
            answer_ids[row, : request.num_output_tokens] = request.output_token_ids
            for item in request.items:
                item.place(src_index[row], rows.get(item.identifier))
        return ScoreBatch(
            token_ids=token_ids,
            lengths=np.array([one.num_tokens for one in requests], np.int32),
            positions=positions,
            src_index=src_index,
            span_end=span_end if self._sees in AHEAD else None,
            answer_ids=answer_ids,
            answer_starts=np.array([one.num_prompt_tokens for one in requests], np.int32),
            encoders=encoders,
            prompts=prompts,
            num_pool_rows=rows.num_rows + self.num_extra_rows,
        )

    def _make_request(
        self, number: int, inputs: MultiModalInputs | Sample, answer: Sequence[int]
    ) -> Request:
        sample = inputs if isinstance(inputs, Sample) else make_sample(inputs)
        if any(name.endswith("_embeds") for item in sample.items for name in item.tensors):
            raise ValueError(
                f"an item of prompt {number} is given by its embeddings, of which no gradient "
                "reaches the tower; give the image or video that they were made of"
            )
        unknown = [f"item {place} of prompt {number}" for place in range(len(sample.items))]
        return make_request(
            sample,
            self._host_inputs,
            self._sees,
            identifiers=sample.item_hashes or unknown,
            answer=[int(token_id) for token_id in answer],
            max_tokens=max(1, len(answer)),
        )

    def _encode(
        self, requests: Sequence[Request], num_tokens: int
    ) -> tuple[EncoderRows, tuple[EncoderInputs, ...], PromptInputs | None]:
        """Return where each item's embeddings are in the pool, and what the encoders are given.

        `num_tokens`: of a sequence, padded.
        """
        items = {item.identifier: item for one in requests for item in one.media_items}
        states = {
            one.encoder.identifier: one.encoder for one in requests if one.encoder is not None
        }
        needed = sum(item.num_embeds for item in (*items.values(), *states.values()))
        host_inputs = self._host_inputs
        rows = EncoderRows(round_size(needed, _LEAST_TOKENS), host_inputs.num_extra_rows)
        num_rows = rows.num_rows + host_inputs.num_extra_rows
        encoders = _encode_items(list(items.values()), host_inputs, rows, num_rows)
        if not self._max_encoder_len:
            return rows, encoders, None
        for identifier, one in states.items():
            rows.allocate(identifier, one.num_embeds)
        longest = max((one.num_embeds for one in states.values()), default=1)
        length = min(round_size(longest, _LEAST_TOKENS), self._max_encoder_len)
        calls = PromptCalls(max_len=length, num_rows=num_rows)
        size = round_size(len(states))
        call = next(iter(calls.fill(list(states.values()), rows.get, [size])), calls.empty(size))
        state_rows = np.full((len(requests), length), TEXT_ROW, np.int32)
        for row, request in enumerate(requests):
            if request.encoder is not None:
                state_rows[row, : request.encoder_len] = rows.get(request.encoder.identifier)
        return rows, encoders, PromptInputs(call, state_rows, self._find_seen(requests, num_tokens))

    def _find_seen(self, requests: Sequence[Request], num_tokens: int) -> np.ndarray | None:
        if not self._host_inputs.attends_to_items:
            return None
        return np.stack([request.seen_between(0, num_tokens) for request in requests])


def _encode_items(
    items: Sequence[EncoderItem], host_inputs: HostInputs, rows: EncoderRows, num_rows: int
) -> tuple[EncoderInputs, ...]:
    """Give rows to items, and return the one call of each encoder that encodes them."""
    encoders = Encoders(host_inputs, Placement(), num_rows)
    places = [encoders.allocate(item, rows) for item in items]
    sizes = {
        function: _find_sizes(
            calls.spec, [calls.count_units(item) for item in items if calls.takes(item)]
        )
        for function, calls in encoders.by_function.items()
    }
    calls = encoders.fill(items, places, sizes)
    return tuple(EncoderInputs(call.inputs, call.dst_rows) for call in calls)


def _find_sizes(spec: EncoderSpec | PackedEncoderSpec, counts: Sequence[int]) -> Sequence[int]:
    """Return the sizes that a call with all items may have."""
    if not isinstance(spec, PackedEncoderSpec):
        return [round_size(sum(counts))]
    # No more than if each began where a block of keys of its own would.
    block = BLOCK_SIZE * spec.patches_per_key
    most = sum(round_up(count, block) + spec.patches_per_start for count in counts)
    largest = 1 << (most - 1).bit_length()
    return patch_buckets(
        largest_item=largest, encoder_budget=largest, patches_per_start=spec.patches_per_start
    )
