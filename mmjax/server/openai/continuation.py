"""A request that another server may go on with: which of its events the client has.

A router (`mmjax.deploy.router`) gives a request to another replica if its first one dies. So that
the second one goes on where the first one ended, ids, times and seeds follow from the request's
key, and every event of a stream has a mark with the tokens that it tells of. The second one's
engine goes on after those tokens; its events begin with theirs, and those that the client has
are left out. Set by who calls the application within its process, never by what comes over HTTP.
"""

import hashlib
import secrets
import time
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mmjax.errors import EngineUnavailableError
from mmjax.frontend.output.outputs import CompletionOutput, RequestOutput, SampleLogprobs

Choice = tuple[int, int]
"""A prompt's number, and which of its `n` answers."""

BEFORE_OUTPUT: Choice = (-1, 0)
AFTER_OUTPUT: Choice = (-2, 0)
"""Stand for the choice in events that tell of none: before the first output, after the last."""


class EventMark(NamedTuple):
    """Which of a request's events one is: the same, whichever server makes it."""

    choice: Choice
    num_tokens: int
    """Tokens of the choice, with this event's."""
    ordinal: int
    """Counts the events with the same two, from 1."""
    new_token_ids: list[int]
    """Tokens of the choice since its last event."""
    new_logprobs: SampleLogprobs
    """Log-probabilities of those tokens; empty if none were asked for."""
    num_cached_tokens: int
    """Tokens of the choice's prompt that the prefix cache had."""


@dataclass(slots=True)
class SentEvents:
    """The events that a client has."""

    last: dict[Choice, tuple[int, int]] = field(default_factory=dict)
    """The last one's (num_tokens, ordinal)."""
    token_ids: dict[Choice, list[int]] = field(default_factory=dict)
    logprobs: dict[Choice, SampleLogprobs] = field(default_factory=dict)
    """The engine gives those of new tokens alone, and some last events tell of all."""
    num_cached_tokens: dict[int, int] = field(default_factory=dict)
    """Number of a prompt -> its cached tokens: a request's usage is that of its first server."""

    def add(self, mark: EventMark) -> None:
        """Note that the client has an event."""
        self.last[mark.choice] = (mark.num_tokens, mark.ordinal)
        self.token_ids.setdefault(mark.choice, []).extend(mark.new_token_ids)
        self.logprobs.setdefault(mark.choice, []).extend(mark.new_logprobs)
        self.num_cached_tokens.setdefault(mark.choice[0], mark.num_cached_tokens)

    def has(self, choice: Choice, num_tokens: int, ordinal: int) -> bool:
        """Whether the client has an event."""
        return choice in self.last and (num_tokens, ordinal) <= self.last[choice]


class Continuation:
    """One try at a request."""

    def __init__(
        self,
        key: str,
        *,
        created: int,
        age_s: float = 0.0,
        attempt: int = 0,
        sent: SentEvents | None = None,
    ) -> None:
        """`key`: of the request; `created`: of its first try, in seconds since 1970.

        `age_s`: seconds since then. `sent`: what its earlier tries have sent.
        """
        self.created = created
        self.age_s = age_s
        self.attempt = attempt
        self.is_lost = False
        """Whether the engine was lost within the stream, so that another one must go on."""
        self._key = key
        self._sent = SentEvents() if sent is None else sent
        self._num_ids = 0
        self._choice: Choice = BEFORE_OUTPUT
        self._token_ids: dict[Choice, list[int]] = {}
        self._logprobs: dict[Choice, SampleLogprobs] = {}
        self._num_cached_tokens: dict[int, int] = {}
        self._num_marked: dict[Choice, int] = {}
        self._ordinal = 0
        self._mark: EventMark | None = None

    def new_hex(self) -> str:
        """Return the request's next id, of 32 hex digits."""
        self._num_ids += 1
        return self._digest(f"id {self._num_ids}").hex()

    def seed(self, number: int) -> int:
        """Return the seed of the prompt of that number, of 31 bits."""
        return int.from_bytes(self._digest(f"seed {number}")[:4]) >> 1

    def generated_token_ids(self, number: int, n: int) -> list[list[int]]:
        """Return the tokens that the client has of each answer to a prompt; [] if it has none."""
        found = [list(self._sent.token_ids.get((number, index), ())) for index in range(n)]
        return found if any(found) else []

    async def marked(
        self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield `outputs`; the events that follow each one are its own."""
        try:
            async for number, output in outputs:
                items = [self._take(number, item) for item in output.outputs]
                num_cached = self._sent.num_cached_tokens.get(number, output.num_cached_tokens)
                self._num_cached_tokens[number] = num_cached
                yield number, replace(output, outputs=items, num_cached_tokens=num_cached)
            self._choice, self._ordinal = AFTER_OUTPUT, 0
        except EngineUnavailableError:
            self.is_lost = True
            raise
        finally:
            await outputs.aclose()

    def _take(self, number: int, item: CompletionOutput) -> CompletionOutput:
        """Note an output, and return it with the log-probabilities of another engine's tokens."""
        self._choice, self._ordinal = (number, item.index), 0
        token_ids = self._token_ids.setdefault(self._choice, [])
        logprobs = self._logprobs.setdefault(self._choice, [])
        sent = self._sent.logprobs.get(self._choice, [])
        first, last = len(token_ids), len(token_ids) + len(item.token_ids)
        token_ids += item.token_ids
        if item.logprobs is None and item.token_ids and last <= len(sent):
            item = replace(item, logprobs=sent[first:last])
        logprobs += item.logprobs or []
        return item

    def count_event(self) -> bool:
        """Count the next event; return whether the client lacks it."""
        choice, token_ids = self._choice, self._token_ids.get(self._choice, [])
        self._ordinal += 1
        num_marked = self._num_marked.get(choice, 0)
        self._num_marked[choice] = len(token_ids)
        if self._sent.has(choice, len(token_ids), self._ordinal):
            return False
        first = max(num_marked, len(self._sent.token_ids.get(choice, [])))
        self._mark = EventMark(
            choice,
            len(token_ids),
            self._ordinal,
            token_ids[first:],
            self._logprobs.get(choice, [])[first:],
            self._num_cached_tokens.get(choice[0], 0),
        )
        return True

    def take_mark(self) -> EventMark | None:
        """Return the mark of the event that was counted last, once."""
        mark, self._mark = self._mark, None
        return mark

    def _digest(self, name: str) -> bytes:
        return hashlib.blake2b(f"{self._key} {name}".encode(), digest_size=16).digest()


CONTINUATION: ContextVar[Continuation | None] = ContextVar("continuation", default=None)
"""The continuation of the request that is being served; None without a router."""


def new_hex() -> str:
    """Return 32 hex digits for an id of the request that is being served."""
    continuation = CONTINUATION.get()
    return secrets.token_hex(16) if continuation is None else continuation.new_hex()


def age_s() -> float:
    """Return for how long the request that is being served was served before, elsewhere."""
    continuation = CONTINUATION.get()
    return 0.0 if continuation is None else continuation.age_s


def created_at() -> int:
    """Return when the request that is being served came, in seconds since 1970."""
    continuation = CONTINUATION.get()
    return int(time.time()) if continuation is None else continuation.created
