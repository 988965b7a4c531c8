"""The scheduler's output, the runner's, and what is told of it. Plain data, no device arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from mmjax.cache.adapter_slots import NO_SLOT
from mmjax.cache.kv.kv_cache_manager import BlockCopy, BlockSource
from mmjax.engine.scheduling.request import EncoderItem, Request
from mmjax.transport.messages import Alignment, RequestOutputDelta, TokenLogprobs
from mmjax.weights.adapter import Adapter


# Structs are made in a quarter of a dataclass's time, and a step makes one for each request.
class ScheduledRequest(msgspec.Struct, frozen=True):
    """A window of one request's tokens: [start, start + num_tokens).

    Each token that is guessed ahead is a window of its own, behind the request's other one.
    """

    request: Request
    start: int
    num_tokens: int
    block_table: np.ndarray
    """int32[max_blocks]; unused entries are 0."""
    samples: bool
    """Whether the window ends with the request's last token, so that the next one is sampled."""
    token_from: int = -1
    """Row of the previous sample that is the window's last token; -1: the host has read it."""
    encodes: bool = False
    """Whether items are encoded for it in this step."""
    encoder_table: np.ndarray | None = None
    """int32[max_encoder_blocks] of an encoder-decoder model's request; unused entries are 0."""
    is_guessed: bool = False
    """Whether it is known to be the request's token once the samples before it are read."""

    @property
    def end(self) -> int:
        """Position after the window."""
        return self.start + self.num_tokens

    @property
    def awaits_mask(self) -> bool:
        """Whether its sample's mask is known once its grammar has read the token in flight."""
        return self.samples and self.token_from >= 0 and self.request.logit_rules.has_grammar

    @property
    def num_new_states(self) -> int:
        """Encoder hidden states whose keys and values the step writes: 0 but in a first step."""
        return self.request.encoder_len if self.start == self.request.num_found_tokens else 0


class WantedGuess(NamedTuple):
    """A request behind whose known tokens some are to be guessed; it has blocks for them."""

    request: Request
    num_tokens: int
    block_table: np.ndarray
    """int32[max_blocks]"""


class Draft(Protocol):
    """A smaller model, which computes the same requests in the same blocks."""

    @property
    def is_ready(self) -> bool:
        """Whether nothing would have to be compiled for a guess."""
        ...

    def guess(self, wanted: Sequence[WantedGuess]) -> list[list[int]]:
        """Return what each request would be given: as many tokens as are wanted."""
        ...


class AdapterLoad(NamedTuple):
    """An adapter that goes into a slot."""

    slot: int
    adapter: Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's work."""

    requests: Sequence[ScheduledRequest] = ()
    encoder_items: Sequence[EncoderItem] = ()
    """To encode before the step, each identifier once."""
    freed_identifiers: Sequence[str] = ()
    """Encoder outputs to drop before encoding."""
    num_preempted: int = 0
    adapter_loads: Sequence[AdapterLoad] = ()
    """Before all else."""
    restored_states: Sequence[tuple[int, int]] = ()
    """Slots from which to which states are copied, one after the other, before the step."""
    kept_states: Sequence[tuple[int, int]] = ()
    """Likewise, after the step."""
    copied_blocks: Sequence[BlockCopy] = ()
    """KV blocks that are copied to slots of host memory, before anything is written to them."""
    restored_blocks: Sequence[tuple[BlockSource, int]] = ()
    """What is copied to KV blocks, and to which, after that and before the step."""

    @property
    def has_adapters(self) -> bool:
        """Whether any request has an adapter."""
        return any(scheduled.request.adapter_slot != NO_SLOT for scheduled in self.requests)

    @property
    def awaits_masks(self) -> bool:
        """Whether the step before must be read before this one can be sampled."""
        return any(scheduled.awaits_mask for scheduled in self.requests)

    @property
    def has_guesses(self) -> bool:
        """Whether the next step cannot be scheduled before this one is read."""
        return any(scheduled.is_guessed for scheduled in self.requests)

    @property
    def is_plain(self) -> bool:
        """Whether it computes a token of each request, none of them guessed, and nothing else."""
        is_short = not self.encoder_items and self.num_tokens == len(self.requests)
        return is_short and not self.has_guesses

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all windows."""
        return sum(scheduled.num_tokens for scheduled in self.requests)


class SampledToken(msgspec.Struct, frozen=True):
    """The sampled token of one request, with log-probabilities if it asked for them."""

    token_id: int = -1
    """-1: the window did not sample; it reports what is known of its prompt alone."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    """Log-probabilities of the prompt's tokens that the window's tokens predict."""
    alignment: Alignment | None = None
    """Of the request's prompt, with its first window."""
    states: np.ndarray | None = None
    """float32[rows, D]: of an engine that pools, in place of all else: of the window's tokens, or
    of its last one alone (`Request.find_pooled`)."""


ModelRunnerOutput = dict[str, list[SampledToken]]
"""request_id -> the token of each of its windows, if these `sample` or report of the prompt."""


def make_delta(
    request: Request, taken: Sequence[SampledToken], weights_version: int, *, is_first: bool
) -> RequestOutputDelta:
    """Return what the API server is told of new tokens: with the first, of the prompt, too."""
    of_prompt: dict[str, Any] = {}
    if is_first:
        of_prompt = {
            "times": request.times,
            "encoded": request.encoded,
            "encoded_apart": request.encoded_apart,
            "found_on_disk": request.found_on_disk,
            "prompt_logprobs": request.prompt_logprobs or None,
            "alignment": request.alignment,
        }
    return RequestOutputDelta(
        request_id=request.request_id,
        new_token_ids=[token.token_id for token in taken],
        new_logprobs=[one.logprobs for one in taken if one.logprobs is not None] or None,
        finish_reason=request.status.value if request.is_finished else None,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        weights_version=weights_version,
        vectors=request.take_vectors(),
        **of_prompt,
    )
