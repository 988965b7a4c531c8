"""How long each stage of a request takes: one struct, which P0 and P1 fill.

Knows nothing of what the stages do.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Literal, get_args

import msgspec

Stage = Literal["fetch", "tokenize", "decode", "process", "queue", "encode", "prefill", "generate"]
_STAGES: tuple[Stage, ...] = get_args(Stage)
_STAGE_TIMES = attrgetter(*_STAGES)


class RequestTimes(msgspec.Struct, kw_only=True, omit_defaults=True):
    """When a request came and got its tokens, and how long each stage took, in seconds.

    Times of day are P0's `time.monotonic()`. A stage that did not occur took 0.
    """

    arrived_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    fetch: float = 0.0
    """Get the media's bytes: download them, or decode their base64. Images that are decoded while
    others arrive are in it."""
    tokenize: float = 0.0
    """Render the chat template, and tokenize."""
    decode: float = 0.0
    """Media files to pixels."""
    process: float = 0.0
    """Hash, resize and normalise the media, and expand their placeholders."""
    queue: float = 0.0
    """Wait for a turn: to decode in P0, to be scheduled in P1."""
    engine_queue: float = 0.0
    """What of it is P1's."""
    encode: float = 0.0
    """Run the encoder over the items that were not cached. A step's requests share its time."""
    prefill: float = 0.0
    """Compute the prompt: from the first step to the first token, without `encode`."""
    generate: float = 0.0
    """From the first token to the last one."""

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return sum(_STAGE_TIMES(self))

    def by_stage(self) -> dict[Stage, float]:
        """Return the seconds of each stage, in the order of a request's life."""
        return dict(zip(_STAGES, _STAGE_TIMES(self), strict=True))

    def wait_until(self, now: float) -> None:
        """Count what has passed since the arrival, and is of no stage, as `queue`."""
        self.queue += max(0.0, now - self.arrived_at - self.total)

    def note_token(self, now: float) -> None:
        """Record that tokens came."""
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now
        self.generate = now - self.first_token_at

    def add_engine(self, other: "RequestTimes") -> None:
        """Add P1's stages; of several sequences the longest count."""
        self.queue += max(0.0, other.queue - self.engine_queue)
        self.engine_queue = max(self.engine_queue, other.queue)
        self.encode = max(self.encode, other.encode)
        self.prefill = max(self.prefill, other.prefill)


_CURRENT: ContextVar[RequestTimes | None] = ContextVar("_CURRENT", default=None)
"""The times of the request that this thread works on."""


@contextmanager
def recording(times: RequestTimes) -> Iterator[None]:
    """Let `measuring` add to `times`, in this thread."""
    token = _CURRENT.set(times)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_times() -> RequestTimes:
    """Return what this thread records to; outside of `recording`, new ones."""
    return _CURRENT.get() or RequestTimes(arrived_at=time.monotonic())


@contextmanager
def measuring(stage: Stage) -> Iterator[None]:
    """Add the time of the block to a stage of the current request, but for stages within it."""
    times = _CURRENT.get()
    if times is None:
        yield
        return
    begin, before = time.monotonic(), times.total
    try:
        yield
    finally:
        inner = times.total - before
        own = time.monotonic() - begin - inner
        setattr(times, stage, getattr(times, stage) + own)
