"""A request in the engine: tokens to compute, items to encode. No device arrays."""

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from jaxtyping import Float

from mmjax.cache.adapter_slots import NO_SLOT
from mmjax.cache.kv.block_hash import (
    BlockHash,
    BlockHashAlgorithm,
    hash_block_tokens,
    iter_block_hashes,
)
from mmjax.cache.state_slots import NO_STATE
from mmjax.engine.scheduling.adapters import RegisteredAdapter
from mmjax.engine.scheduling.logit_rules import LogitRules
from mmjax.engine.scheduling.spans import Spans, find_spans
from mmjax.layers.recurrent.chunks import find_chunk_ends, find_snapshot_places
from mmjax.models.host_inputs import RotaryPositions, Sees, find_seen_rows
from mmjax.params.pooling_params import PoolingParams
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.system.logger import get_logger
from mmjax.system.request_times import RequestTimes
from mmjax.transport.messages import Alignment, TokenLogprobs, Vectors

logger = get_logger(__name__)

NUM_MASKED = 32
"""Tokens that `min_tokens` holds back by the batch's own table; further ones are bans, which cost
their requests a larger one."""
_LEAST_NORM = 1e-12
"""Of a vector that is divided by its length, as of torch's `F.normalize`."""


class RequestStatus(enum.Enum):
    """The state of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Its blocks were freed; it waits to be computed again."""
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderItem:
    """One item of a prompt: its placeholder, and its encoder inputs or embeddings."""

    identifier: str
    """Equal identifiers share one encoder output."""
    mm_hash: str | None = None
    """The hash of its content, by which the API server knows it; None: its identifier."""
    mm_position: PlaceholderRange
    units: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Inputs of the model's `encode`, each `[units, ...]`."""
    rows: np.ndarray | None = None
    """int32[num_embeds]: which of the encoder's rows the embeddings are (`HostInputs.embed_rows`);
    None: all, in order."""
    embeds: np.ndarray | None = None
    """[num_embeds, D]: precomputed embeddings; the item is then not encoded. With `rows`: those of
    the encoder's rows that these name, in the encoder's order."""
    is_causal: bool = False
    """Whether its embeddings see nothing behind them, whatever the model's items see."""
    adapter_slot: int = NO_SLOT
    """Where the adapter is that the towers encode it with."""
    prompt: "EncoderPrompt | None" = None
    """Whose hidden states the embeddings are, of an encoder-decoder model's encoder."""

    @property
    def start(self) -> int:
        """First position of the placeholder."""
        return self.mm_position.offset

    @property
    def end(self) -> int:
        """Position after the placeholder."""
        return self.mm_position.offset + self.mm_position.length

    @property
    def is_encoded(self) -> bool:
        """Whether a tower gives its embeddings."""
        return self.embeds is None and self.prompt is None

    @property
    def num_embeds(self) -> int:
        """Number of rows of the encoder output."""
        return self.mm_position.get_num_embeds()

    @property
    def num_rows(self) -> int:
        """Number of rows of an item that is attended to, whatever stands in the prompt."""
        return self.num_embeds if self.rows is None else len(self.rows)

    @property
    def num_kept(self) -> int:
        """Number of the encoder's rows that its embeddings are: some may be twice, or learned."""
        return self.num_embeds if self.rows is None else len(np.unique(self.rows[self.rows >= 0]))

    def place(self, target: np.ndarray, rows: np.ndarray) -> None:
        """Set the row of each of its embeddings where that stands in a prompt, int32[prompt]."""
        mask = self.mm_position.is_embed
        chosen = slice(None) if mask is None else np.asarray(mask, bool)
        target[self.start : self.end][chosen] = rows

    def has_embeds_from(self, position: int) -> bool:
        """Return whether an embedding stands at a position of the prompt, or behind it."""
        return self.has_embeds_between(position, self.end)

    def has_embeds_between(self, start: int, end: int) -> bool:
        """Return whether an embedding stands in [start, end) of the prompt."""
        low, high = (
            min(max(0, place - self.start), self.mm_position.length) for place in (start, end)
        )
        first, last = self.mm_position.get_embeds_indices_in_range(low, high)
        return first < last


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPrompt:
    """The prompt of an encoder-decoder model's encoder, of one request."""

    token_ids: np.ndarray
    """int32[S]"""
    items: Sequence[EncoderItem] = ()
    """Whose embeddings stand in it; they are shared by identifier, and encoded before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHasher:
    """Block hashing of one engine."""

    block_size: int
    none_hash: BlockHash
    """The parent hash of first blocks."""
    algorithm: BlockHashAlgorithm = "sha256"
    is_of_prompts: bool = False
    """Whether only a prompt's blocks are hashed. Recurrent layers add an answer's tokens in another
    order than a prompt's, and behind a reference they see less: a later prompt that holds them must
    not find what depends on that."""

    def hash_new_blocks(self, request: "Request") -> list[BlockHash]:
        """Return the hashes of the request's full blocks beyond `block_hashes`."""
        length = request.num_prompt_tokens if self.is_of_prompts else request.num_tokens
        if length // self.block_size == len(request.block_hashes):
            return []
        new = iter_block_hashes(
            request,
            self.block_size,
            token_ids=request.token_ids[:length],
            previous=request.block_hashes,
            algorithm=self.algorithm,
            none_hash=self.none_hash,
        )
        return list(new)

    def digest(self, token_ids: np.ndarray, items: Sequence[EncoderItem]) -> str:
        """Return a digest of tokens, and of the items among them with their places."""
        keys = tuple(("mm", item.identifier, item.start) for item in items)
        return hash_block_tokens(self.none_hash, token_ids, keys, self.algorithm).hex()


def join_rows(identifier: str, items: Sequence[EncoderItem]) -> EncoderItem | None:
    """Return the rows of items that are attended to as an encoder's states; None without items.

    In the encoder's prompt stand the items' rows alone, in the order of the items.
    """
    if not items:
        return None
    placed, length = list[EncoderItem](), 0
    for item in sorted(items, key=lambda one: one.start):
        placed.append(replace(item, mm_position=PlaceholderRange(length, item.num_rows)))
        length += item.num_rows
    return EncoderItem(
        identifier=identifier,
        mm_position=PlaceholderRange(offset=0, length=length),
        prompt=EncoderPrompt(token_ids=np.zeros(length, np.int32), items=placed),
    )


_RUNNING, _WAITING, _PREEMPTED = (
    RequestStatus.RUNNING,
    RequestStatus.WAITING,
    RequestStatus.PREEMPTED,
)


class Forecast(Protocol):
    """What is known of guesses of one request's tokens."""

    @property
    def chance(self) -> float:
        """How likely the next token of a guess is right, if all before it are; 0 without one."""
        ...

    def note(self, token_ids: np.ndarray, num_guessed: int, num_new: int) -> None:
        """Take in what the request was given.

        Args:
            token_ids: int32[tokens]: all that are known.
            num_guessed: How many guessed tokens were verified.
            num_new: How many of the tokens came since the last call.
        """
        ...


class Request:
    """Mutable state of one request; only the scheduler changes it."""

    num_in_flight = 0
    """Sampled tokens that the host has not read yet."""
    sampled_row = 0
    """Row of the last sample that holds the token in flight."""
    queued_at = 0.0
    adapter_slot = NO_SLOT
    """Where its adapter is on the device, while it runs."""
    state_slots: tuple[int, ...] = ()
    """Where the states of recurrent layers are on the device, while it runs: those behind all that
    was computed, and then those that are behind each guessed token."""
    found_state = NO_STATE
    """The slot of the snapshot that it begins with."""
    forecast: Forecast | None = None
    """What is known of guesses of its tokens; None: none are guessed."""
    num_drafted_tokens = 0
    """Tokens whose keys the draft model has computed, which keeps the number."""
    states: np.ndarray | None = None
    """float32[rows, D]: what is known of the states that become vectors."""
    _attended: Sequence[EncoderItem] = ()
    """Items whose rows `encoder` has, as they stand in the prompt (`attends_to_items`)."""
    num_found_tokens = 0
    """Of its tokens, those whose blocks it found when it started: its first window is behind."""
    started_at = 0.0
    """When a step first held it, in `time.monotonic()` seconds; 0: not yet."""
    stop_reason: int | None
    """The stop token that ended the request; None for the tokenizer's EOS."""
    alignment: Alignment | None = None
    """That of its prompt, if it is wanted and known."""

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        max_model_len: int,
        output_token_ids: Sequence[int] = (),
        items: Sequence[EncoderItem] = (),
        encoder: EncoderItem | None = None,
        attended: Sequence[EncoderItem] = (),
        rotary: RotaryPositions | None = None,
        eos_token_ids: Sequence[int] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: RegisteredAdapter | None = None,
        block_hasher: BlockHasher | None = None,
        logit_rules: LogitRules | None = None,
        sees: Sees = "past",
    ) -> None:
        self.request_id, self.sampling_params = request_id, sampling_params
        self.items = sorted(items, key=lambda item: item.start)
        self.encoder = encoder
        """The hidden states that an encoder-decoder's request attends to, under an identifier of
        its own, since they depend on all of its encoder's prompt; None for a decoder alone."""
        self._attended = sorted(attended, key=lambda item: item.start)
        self.rotary = rotary
        """Where its tokens are, if not at their indices."""
        self.encoder_len = 0 if encoder is None else encoder.num_embeds
        self.num_prompt_tokens = len(prompt_token_ids)
        room = max_model_len - self.num_prompt_tokens
        self.max_tokens = min(sampling_params.max_tokens or room, room)
        self.num_tokens = self.num_prompt_tokens + len(output_token_ids)
        num_slots = max(self.num_prompt_tokens + self.max_tokens, self.num_tokens)
        self.token_ids = np.zeros(num_slots, np.int32)
        """Prompt and output tokens; the first `num_tokens` are valid."""
        self.token_ids[: self.num_tokens] = (*prompt_token_ids, *output_token_ids)
        self.num_computed_tokens = self.num_cached_tokens = self.num_preemptions = 0
        self.times, self.status, self.stop_reason = RequestTimes(), RequestStatus.WAITING, None
        self.encoded, self.found_on_disk, self.encoded_apart = [], list[str](), list[str]()
        """Identifiers of the items that were encoded for it, read from disk, encoded by workers."""
        self.seed = sampling_params.seed or 0
        self.priority, self.cache_salt, self.lora_request = priority, cache_salt, lora_request
        self.logit_rules = logit_rules or LogitRules(sampling_params)
        if sampling_params.ignore_eos and not self.logit_rules.has_grammar:
            eos_token_ids = ()
        self.ending_token_ids = frozenset((*eos_token_ids, *sampling_params.stop_token_ids))
        self._own_eos_token_id = eos_token_ids[0] if eos_token_ids else None
        self.items_end = max((item.end for item in self.items), default=0)
        """Position after the last item."""
        ending_from = self.num_prompt_tokens + sampling_params.min_tokens
        is_plain = sampling_params.is_plain and not self.logit_rules.has_edits
        self.plain_from = ending_from if is_plain else 2**63
        """Position from which on sampling is a plain argmax, without masks or log-probabilities."""
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        """Those of the prompt's tokens that are known; the first token has none."""
        self.block_hashes: list[BlockHash] = []  # of the full blocks; none without prefix caching
        self._block_hasher = block_hasher
        self._sees: Sees = sees
        self._hash_new_blocks()

    @property
    def media_items(self) -> Sequence[EncoderItem]:
        """The items of its prompts, the decoder's or the encoder's."""
        if self.encoder is None or self.encoder.prompt is None:
            return self.items
        return self.encoder.prompt.items

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens."""
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def num_output_tokens(self) -> int:
        """Number of sampled tokens."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The sampled tokens."""
        return self.token_ids[self.num_prompt_tokens : self.num_tokens].tolist()

    @property
    def known_token_ids(self) -> np.ndarray:
        """int32[tokens]: a view of prompt and sampled tokens."""
        return self.token_ids[: self.num_tokens]

    @property
    def mm_features(self) -> Sequence[EncoderItem]:
        """The items that stand in the prompt, under the name that block hashing uses."""
        return self._attended or self.items

    @property
    def positions_key(self) -> str:
        """What of the whole prompt its tokens' positions depend on."""
        return "" if self.rotary is None else self.rotary.cache_key

    @cached_property
    def spans(self) -> Spans:
        """What its prompt's tokens see beside those before them."""
        places = [item.mm_position for item in self.items]
        causal = [item.mm_position for item in self.items if item.is_causal]
        return find_spans(places, self.num_prompt_tokens, self._sees, causal)

    @cached_property
    def _seen_rows(self) -> np.ndarray:
        """int32[2, prompt]: what `seen_between` gives of the prompt."""
        offsets, counts = (
            [item.start for item in self._attended],
            [item.num_rows for item in self._attended],
        )
        return find_seen_rows(offsets, counts, self.num_prompt_tokens)

    def seen_between(self, start: int, end: int) -> np.ndarray:
        """Return int32[2, end - start]: which of its `encoder`'s states its tokens attend to.

        The first of them and the one behind the last, of items that stand in the prompt; tokens
        behind the prompt attend to those that its last one attends to.
        """
        places = np.minimum(np.arange(start, end), self.num_prompt_tokens - 1)
        return self._seen_rows[:, places]

    @cached_property
    def chunk_ends(self) -> np.ndarray:
        """int32[chunks]: where its prompt's chunks end, for recurrent layers."""
        return find_chunk_ends([item.start for item in self.items], self.num_prompt_tokens)

    def chunk_ends_between(self, start: int, end: int) -> np.ndarray:
        """Return int32[chunks]: the ends of a window's chunks.

        Tokens behind the prompt are a chunk each, as when they were sampled.
        """
        low, high = np.searchsorted(self.chunk_ends, [start, end], side="right")
        sampled = np.arange(max(start, self.num_prompt_tokens) + 1, end + 1, dtype=np.int32)
        return np.concatenate([self.chunk_ends[low:high], sampled])

    def last_chunk_end(self, end: int) -> int:
        """Return the last place up to `end` where a window may end, for recurrent layers."""
        if end >= self.num_prompt_tokens:
            return end
        number = np.searchsorted(self.chunk_ends, end, side="right")
        return int(self.chunk_ends[number - 1]) if number else 0

    @cached_property
    def snapshot_places(self) -> tuple[int, ...]:
        """Behind how many tokens the states of recurrent layers are kept for later requests.

        None without a cache of blocks.
        """
        if self._block_hasher is None:
            return ()
        item_ends = [item.end for item in self.items]
        return find_snapshot_places(
            item_ends, self.num_prompt_tokens, self._block_hasher.block_size
        )

    @cached_property
    def seen_ahead(self) -> tuple[int, str] | None:
        """The first position whose keys depend on later blocks, and a digest of them.

        None where no position's do, and without a cache of blocks.
        """
        first, hasher = self.spans.first_ahead, self._block_hasher
        if hasher is None or first is None:
            return None
        return first, hasher.digest(self.token_ids[: self.spans.stop], self.items)

    @property
    def is_finished(self) -> bool:
        """Whether the request has left the scheduler."""
        status = self.status
        return status is not _RUNNING and status is not _WAITING and status is not _PREEMPTED

    def accept_states(self, num_guessed: int) -> None:
        """Go on from the states behind so many guessed tokens, which are right."""
        self.state_slots = (*self.state_slots[num_guessed:], *self.state_slots[:num_guessed])

    @property
    def num_tokens_with_in_flight(self) -> int:
        """Tokens that can be computed: known ones and those in flight."""
        return self.num_tokens + self.num_in_flight

    @property
    def is_last_in_flight(self) -> bool:
        """Whether the token in flight reaches `max_tokens`."""
        return self.num_tokens_with_in_flight - self.num_prompt_tokens >= self.max_tokens

    def needs_min_tokens(self, place: int) -> bool:
        """Return whether `min_tokens` masks end tokens at a position."""
        return place - self.num_prompt_tokens < self.sampling_params.min_tokens

    @cached_property
    def held_back_token_ids(self) -> list[int]:
        """What `min_tokens` masks: `NUM_MASKED` of them by the batch's table, others by bans."""
        return sorted(self.ending_token_ids) if self.sampling_params.min_tokens else []

    def has_edits(self, place: int) -> bool:
        """Return whether single logits are changed at a position."""
        has_bans = len(self.held_back_token_ids) > NUM_MASKED and self.needs_min_tokens(place)
        return has_bans or self.logit_rules.has_edits

    def find_bans(self, place: int, *, is_last_known: bool) -> list[tuple[int, int]]:
        """Return the tokens that are banned at a position, as `LogitRules.find_bans`."""
        before = self.token_ids[self.num_prompt_tokens : place if is_last_known else place - 1]
        bans = self.logit_rules.find_bans(before, is_last_known=is_last_known)
        if self.needs_min_tokens(place):
            bans += [(-1, token_id) for token_id in self.held_back_token_ids[NUM_MASKED:]]
        return bans

    @property
    def is_blocked(self) -> bool:
        """Whether nothing of it can be scheduled: a grammar or an adapter is not ready.

        Its grammar reads a token, or its adapter's files are not read. A token in flight blocks
        nothing: the step's sample waits for it (`ScheduledRequest.awaits_mask`).
        """
        if self.lora_request is not None and not self.lora_request.is_ready:
            return True
        grammar = self.logit_rules.grammar
        return grammar is not None and not grammar.has_next

    @property
    def reports_prompt(self) -> bool:
        """Whether its prompt's log-probabilities are wanted, and were not sent."""
        return self.sampling_params.prompt_logprobs is not None and not self.num_output_tokens

    def prompt_between(self, start: int, end: int) -> np.ndarray:
        """Return int32[tokens]: the prompt's tokens at the positions [start, end), if any."""
        return self.token_ids[start : min(end, self.num_prompt_tokens)]

    def add_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprobs | None]) -> None:
        """Add those of the tokens behind a window that starts at `start`.

        A preempted request computes its prompt again: its windows begin anew.
        """
        if not start:
            self.prompt_logprobs = [None]
        self.prompt_logprobs[start + 1 :] = logprobs

    def find_pooled(self, start: int, end: int) -> int:
        """Return from which of a window's positions on states become vectors; `end`: from none."""
        pooling = self.sampling_params.pooling
        assert pooling is not None, "the engine pools"
        return start if pooling.reads_all else min(max(start, self.num_prompt_tokens - 1), end)

    def add_states(self, start: int, states: np.ndarray) -> None:
        """Add those of a window's last tokens; a preempted request gives the same again."""
        last = self.num_prompt_tokens - 1
        first = self.find_pooled(start, last)
        skipped = self.find_pooled(0, last)
        if self.states is None:
            self.states = np.zeros((last + 1 - skipped, states.shape[1]), np.float32)
        self.states[first - skipped : first - skipped + len(states)] = states

    def take_vectors(self) -> Vectors | None:
        """Return what a prompt of which all is computed has become; None: it was for text."""
        pooling, states = self.sampling_params.pooling, self.states
        if pooling is None or states is None:
            return None
        vectors, self.states = _pool(pooling, states), None
        return Vectors(width=vectors.shape[1], data=vectors.tobytes())

    @property
    def room_for_guess(self) -> int:
        """Tokens that may be guessed: behind the last of them one is sampled, in `max_tokens`."""
        if self.forecast is None:
            return 0
        return max(0, self.max_tokens - self.num_output_tokens - 1)

    def place_guess(self, token_ids: Sequence[int]) -> None:
        """Put guessed tokens behind the known ones."""
        self.token_ids[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids

    def append_token(self, token_id: int) -> None:
        """Append a sampled token, and finish the request if it ends there."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        if self._block_hasher is not None:
            self._hash_new_blocks()
        num_output_tokens = self.num_tokens - self.num_prompt_tokens
        grammar = self.logit_rules.grammar
        may_stop = num_output_tokens >= self.sampling_params.min_tokens or grammar is not None
        if may_stop and token_id in self.ending_token_ids:
            self.status = RequestStatus.FINISHED_STOPPED
            self.stop_reason = None if token_id == self._own_eos_token_id else token_id
        elif num_output_tokens >= self.max_tokens:
            self.status = RequestStatus.FINISHED_LENGTH
        elif grammar is not None:
            grammar.advance(token_id)

    def start(self, now: float) -> None:
        """Record when a step first holds it."""
        if not self.started_at:
            self.started_at = now
            self.times.queue = now - self.queued_at

    def _hash_new_blocks(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes += self._block_hasher.hash_new_blocks(self)

    def note_found(self, names: Collection[str]) -> None:
        """Note that items were read from disk, and not encoded."""
        self.found_on_disk += [name for name in self.encoded if name in names]
        self.encoded = [name for name in self.encoded if name not in names]

    def change_keys(self, rename: Callable[[EncoderItem], str], hasher: BlockHasher | None) -> None:
        """Take other keys for what other weights compute; a request that holds nothing.

        `rename` gives an item's identifier; `hasher` is that of the engine's requests.
        """
        self.items, self._attended = (
            [replace(item, identifier=rename(item)) for item in items]
            for items in (self.items, self._attended)
        )
        if self.encoder is not None:
            prompt = self.encoder.prompt
            assert prompt is not None, f"{self.encoder.identifier=} has no prompt"
            items = [replace(item, identifier=rename(item)) for item in prompt.items]
            self.encoder = replace(
                self.encoder, identifier=rename(self.encoder), prompt=replace(prompt, items=items)
            )
        if self._block_hasher is not None:
            self._block_hasher, self.block_hashes = hasher, []
            # It has the items' identifiers in it.
            self.__dict__.pop("seen_ahead", None)
            self._hash_new_blocks()

    def items_between(self, start: int, end: int) -> list[EncoderItem]:
        """Return the items that overlap the positions [start, end), in order."""
        if start >= self.items_end:
            return []
        return [item for item in self.items if item.start < end and item.end > start]

    def log_start(self) -> None:
        """Log that it runs."""
        logger.debug(
            "request %s runs: %d of %d tokens found, preempted %d times so far",
            *(self.request_id, self.num_computed_tokens, self.num_tokens, self.num_preemptions),
        )

    def log_end(self) -> None:
        """Log why it ended."""
        logger.debug(
            "request %s ends (%s) with %d tokens",
            *(self.request_id, self.status.value, self.num_output_tokens),
        )


def _pool(
    pooling: PoolingParams, states: Float[np.ndarray, "T D"]
) -> Float[np.ndarray, "_vectors _D"]:
    """Return the vectors of a prompt, float32, of the states that `reads_all` names."""
    vectors = states
    if pooling.task != "token_embed":
        vectors = states.mean(axis=0, keepdims=True)
    vectors = np.ascontiguousarray(vectors[:, : pooling.dimensions], np.float32)
    if pooling.use_activation:
        norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
        vectors /= np.maximum(norms, np.float32(_LEAST_NORM))
    return vectors
