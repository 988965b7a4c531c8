"""A request as the engine sees it: tokens to compute, items to encode. Knows no device."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmjax.cache.kv.block_hash import BlockHash, BlockHashAlgorithm, iter_block_hashes
from mmjax.models.host_inputs import RotaryPositions
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Its blocks went to others; it waits to compute its tokens again."""
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"

    @property
    def is_finished(self) -> bool:
        """Whether the request has left the scheduler."""
        return self.name.startswith("FINISHED")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderItem:
    """One item of a prompt: where its embeddings go, and what they are computed from (or are)."""

    identifier: str
    """Equal identifiers share one encoder output."""
    mm_position: PlaceholderRange
    units: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Inputs of the model's `encode`, each `[units, ...]`."""
    rows: np.ndarray | None = None
    """int32[num_embeds]: which of the encoder's rows the embeddings are (`HostInputs.embed_rows`);
    None: all, in order."""
    embeds: np.ndarray | None = None
    """[num_embeds, D]: rows that came with the request, of which nothing is encoded."""

    @property
    def start(self) -> int:
        """First place of the item in the prompt."""
        return self.mm_position.offset

    @property
    def end(self) -> int:
        """Place after the item."""
        return self.mm_position.offset + self.mm_position.length

    @property
    def num_embeds(self) -> int:
        """Rows of the encoder output."""
        return self.mm_position.get_num_embeds()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """What an encoder-decoder's encoder reads for one request: a prompt and all its items."""

    item: EncoderItem
    """Its identifier is this request's own, for its states depend on picture and text together; its
    place is one in the encoder's prompt, and none in the request's."""
    num_states: int
    """Of the item's embeddings, those that the decoder sees: the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHasher:
    """How one engine names the blocks of its requests."""

    block_size: int
    none_hash: BlockHash
    """The parent of first blocks; another one names no block alike."""
    algorithm: BlockHashAlgorithm = "sha256"

    def hash_new_blocks(self, request: "Request") -> list[BlockHash]:
        """Return the hashes of the request's full blocks that have none yet."""
        if request.num_tokens // self.block_size == len(request.block_hashes):
            return []
        new = iter_block_hashes(
            request,
            self.block_size,
            token_ids=request.token_ids[: request.num_tokens],
            previous=request.block_hashes,
            algorithm=self.algorithm,
            none_hash=self.none_hash,
        )
        return list(new)


_RUNNING, _WAITING, _PREEMPTED = (
    RequestStatus.RUNNING,
    RequestStatus.WAITING,
    RequestStatus.PREEMPTED,
)


class Request:
    """Mutable state of one request; only the scheduler changes it."""

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        max_model_len: int,
        items: Sequence[EncoderItem] = (),
        encoder: "EncoderInput | None" = None,
        rotary: RotaryPositions | None = None,
        eos_token_ids: Sequence[int] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        block_hasher: BlockHasher | None = None,
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.items = sorted(items, key=lambda item: item.start)
        self.encoder = encoder
        """What an encoder-decoder's request looks at; None for a decoder alone."""
        self.rotary = rotary
        """Where its tokens are, if not at their indices."""
        self.encoder_len = 0 if encoder is None else encoder.num_states
        self.num_prompt_tokens = len(prompt_token_ids)
        room = max_model_len - self.num_prompt_tokens
        self.max_tokens = min(sampling_params.max_tokens or room, room)
        self.token_ids = np.zeros(self.num_prompt_tokens + max(self.max_tokens, 0), np.int32)
        """The prompt, then what was sampled; `num_tokens` of them are valid."""
        self.token_ids[: self.num_prompt_tokens] = prompt_token_ids
        self.num_tokens = self.num_prompt_tokens
        self.num_in_flight = 0
        """Sampled tokens that the host has not read yet."""
        self.sampled_row = 0
        """Row of the last sample where the one in flight lies."""
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None
        """The token that ended the text, unless it is the tokenizer's own end."""
        self.seed = sampling_params.seed or 0
        self.priority = priority
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        eos_token_ids = () if sampling_params.ignore_eos else eos_token_ids
        self.ending_token_ids = frozenset((*eos_token_ids, *sampling_params.stop_token_ids))
        self._own_eos_token_id = eos_token_ids[0] if eos_token_ids else None
        self.items_end = max((item.end for item in self.items), default=0)
        """Place from which on there is text alone."""
        is_plain = sampling_params.is_greedy and sampling_params.logprobs is None
        self.plain_from = self.num_prompt_tokens + sampling_params.min_tokens if is_plain else 2**63
        """Place from which on a token is the argmax, without masks or reports."""
        self.span_ends = _span_ends(self.items, self.num_prompt_tokens)
        self.block_hashes: list[BlockHash] = []
        """Of the full blocks of `token_ids`, sampled ones too; empty without a prefix cache."""
        self._block_hasher = block_hasher
        self._hash_new_blocks()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt alone."""
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The sampled tokens."""
        return self.token_ids[self.num_prompt_tokens : self.num_tokens].tolist()

    @property
    def mm_features(self) -> Sequence[EncoderItem]:
        """The items, as block hashes ask for them."""
        return self.items

    @property
    def is_finished(self) -> bool:
        """Whether the request has left the scheduler."""
        status = self.status
        return status is not _RUNNING and status is not _WAITING and status is not _PREEMPTED

    @property
    def num_tokens_in_all(self) -> int:
        """Tokens that can be computed: those that are known, and those in flight."""
        return self.num_tokens + self.num_in_flight

    @property
    def awaits_its_last(self) -> bool:
        """Whether the token in flight is the last, whatever it will be."""
        return self.num_tokens_in_all - self.num_prompt_tokens >= self.max_tokens

    def needs_min_tokens(self, place: int) -> bool:
        """Whether the token at a place of the sequence may not end the text yet."""
        return place - self.num_prompt_tokens < self.sampling_params.min_tokens

    def append_token(self, token_id: int) -> None:
        """Add a sampled token, and finish the request where that ends it."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        if self._block_hasher is not None:
            self._hash_new_blocks()
        num_output_tokens = self.num_tokens - self.num_prompt_tokens
        may_stop = num_output_tokens >= self.sampling_params.min_tokens
        if may_stop and token_id in self.ending_token_ids:
            self.status = RequestStatus.FINISHED_STOPPED
            self.stop_reason = None if token_id == self._own_eos_token_id else token_id
        elif num_output_tokens >= self.max_tokens:
            self.status = RequestStatus.FINISHED_LENGTH

    def _hash_new_blocks(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes += self._block_hasher.hash_new_blocks(self)

    def last_cut(self, end: int) -> int:
        """Return the last place up to `end` that does not lie inside a run of embeddings."""
        if not 0 < end < self.num_prompt_tokens:
            return end
        run_end = self.span_ends[end - 1]
        return end if run_end <= end else int(np.argmax(self.span_ends == run_end))

    def items_between(self, start: int, end: int) -> list[EncoderItem]:
        """Return the items that overlap the places [start, end), in order."""
        if start >= self.items_end:
            return []
        return [item for item in self.items if item.start < end and item.end > start]


def _span_ends(items: Sequence[EncoderItem], num_prompt_tokens: int) -> np.ndarray:
    """Return int32[prompt]: the exclusive end of the run of embeddings at a place, 0 for text.

    Text, a picture of three rows, text: 0 0 5 5 5 0.
    """
    ends = np.zeros(num_prompt_tokens, np.int32)
    for item in items:
        for first, last in item.mm_position.extract_embeds_range():
            ends[first : last + 1] = last + 1
    return ends
