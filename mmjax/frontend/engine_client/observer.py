"""What is told about each request while it is served: to metrics, the log and traces."""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from mmjax.frontend.engine_client.requests import ProcessedRequest
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

EndReason = Literal["abort", "error"]


class NewTokens(NamedTuple):
    """The tokens that a step gave one sequence of a request."""

    request: ProcessedRequest
    num_tokens: int
    is_first: bool
    interval_s: float
    """Since the sequence's last tokens; of the first ones, since the request came."""


class FinishedSequence(NamedTuple):
    """One sequence of a request that came to its end."""

    request: ProcessedRequest
    request_id: str
    """The sequence's."""
    finish_reason: str
    text: str
    num_tokens: int
    num_cached_tokens: int
    first_token_at: float
    """In `time.monotonic()` seconds, as `last_token_at`."""
    last_token_at: float
    is_last: bool
    """Whether all other sequences of the request have ended."""


@runtime_checkable
class RequestObserver(Protocol):
    """Is called in the event loop, in the context of the HTTP request; must not block."""

    def on_added(self, request: ProcessedRequest) -> None:
        """Take note of a request that was processed, and goes to P1."""

    def on_tokens(self, tokens: NewTokens) -> None:
        """Take note of new tokens."""

    def on_finished(self, sequence: FinishedSequence) -> None:
        """Take note of a finished sequence."""

    def on_broken_off(self, request: ProcessedRequest, reason: EndReason) -> None:
        """Take note of a request that ended before all of its sequences were finished."""


def notify(callback: Callable[[], None]) -> None:
    """Call an observer; its faults are none of the request's."""
    try:
        callback()
    except Exception:
        logger.exception("an observer of requests failed")
