"""What the scheduler decides and the runner returns. Plain data, no device arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from mmjax.engine.scheduling.request import EncoderItem, Request
from mmjax.transport.messages import TokenLogprobs


# Structs rather than dataclasses where a step makes one for each request: a quarter of the time.
class ScheduledRequest(msgspec.Struct, frozen=True):
    """A window of one request's tokens: [start, start + num_tokens)."""

    request: Request
    start: int
    num_tokens: int
    block_table: np.ndarray
    """int32[max_blocks]; unused entries are 0."""
    samples: bool
    """Whether the window ends with the request's last token, so that the next is sampled."""
    token_from: int = -1
    """Row of the previous sample that the last token of the window is; -1: the host knows it."""
    encoder_table: np.ndarray | None = None
    """int32[max_encoder_blocks] of an encoder-decoder's request; unused entries are 0."""

    @property
    def end(self) -> int:
        """Place after the window."""
        return self.start + self.num_tokens

    @property
    def num_new_states(self) -> int:
        """Encoder states whose keys and values the step writes: all of them, where it begins."""
        return self.request.encoder_len if self.start == 0 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step's work."""

    requests: Sequence[ScheduledRequest] = ()
    encoder_items: Sequence[EncoderItem] = ()
    """To encode before the step, each identifier once."""
    freed_identifiers: Sequence[str] = ()
    """Encoder outputs to drop before encoding."""
    num_preempted: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all windows."""
        return sum(scheduled.num_tokens for scheduled in self.requests)


class SampledToken(msgspec.Struct, frozen=True):
    """What was drawn for one request, and how likely it was where that was asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


ModelRunnerOutput = dict[str, SampledToken]
"""request_id -> token, for the requests whose window `samples`."""
