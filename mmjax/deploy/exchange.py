"""One request's tries at several replicas, and what of their answers its client has been shown.

A request of which its client has seen nothing is given to another replica as a whole; a stream
goes on behind the events that its client has. Knows nothing of HTTP connections and of Ray.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from starlette.types import Send

from mmjax.deploy.replica import (
    ForwardedRequest,
    Headers,
    NotHeld,
    ReplicaLostError,
    Replicas,
    ResponseEnd,
    ResponseHead,
    ResponseItem,
    ResponsePart,
)
from mmjax.errors import (
    AnswerNotHeldError,
    CapacityError,
    EngineUnavailableError,
    RequestError,
    RequestTimeoutError,
)
from mmjax.server.openai.continuation import SentEvents
from mmjax.server.openai.errors import ErrorBody, error_body, internal_error_body
from mmjax.server.openai.streaming import DONE, KEEP_ALIVE, NAMED_EVENTS, PLAIN_EVENTS, kept_alive
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

MAX_LOST = 3
"""Replicas that a request may lose before it is failed: it may be what ends them."""

_RESPONSES = "/v1/responses"
_NOT_RETURNED = frozenset({b"connection", b"content-length", b"transfer-encoding", b"x-request-id"})


class Patience(NamedTuple):
    """For how long a request waits, in seconds."""

    refused_s: float = 120.0
    """While every replica's engine restarts, for a request that none has had."""
    lost_s: float = 600.0
    """Until another replica goes on with what one has had: the time of a start."""
    question_s: float = 10.0
    """For requests without a body, such as probes, if no replica is there."""
    first_pause_s: float = 0.5
    longest_pause_s: float = 4.0
    """Between two rounds of questions; each is twice as long as the one before."""


class Exchange:
    """One request, and the response to it."""

    def __init__(
        self,
        replicas: Replicas,
        request: ForwardedRequest,
        keys: list[str],
        send: Send,
        *,
        timeout_s: float,
        keep_alive_s: float,
        patience: Patience,
        last_event: int = 0,
    ) -> None:
        """`timeout_s`: until the response begins; `keep_alive_s`: between comments; 0: none.

        `last_event`: the number of the last one that the client has, from another front.
        """
        self._replicas = replicas
        self._request = request
        self._keys = keys
        self._send = send
        self._timeout_s = (timeout_s if request.body else patience.question_s) or None
        self._keep_alive_s = keep_alive_s
        self._patience = patience
        self._last_event = last_event
        self._num_events = 0
        self._is_search = request.held_key is not None
        """Whether no replica has said yet that it holds the answer, and one may."""
        self._timeout: asyncio.Timeout | None = None
        self._sent = SentEvents()
        self._avoided: list[str] = []
        self._replica: str | None = None
        """Who answers the present try, once it does."""
        self._num_tries = 0
        self._num_lost = 0
        self._started_at = time.monotonic()
        self._waits_since: float | None = None
        self._refusal: ErrorBody | None = None
        """The last one, while it waits."""
        self._pause_s = patience.first_pause_s
        self._has_begun = False
        self._is_done = False

    async def run(self) -> None:
        """Try until a replica has answered; RequestError if none does, and nothing was shown."""
        try:
            async with asyncio.timeout(self._timeout_s) as self._timeout:
                while not await self._try():
                    pass
        except TimeoutError:
            if not self._has_begun:
                raise RequestTimeoutError from None
            lost = EngineUnavailableError("no other replica went on with this answer in time")
            await self._show_error(self._refusal or error_body(lost))
        except RequestError as error:
            await self._fail(error)

    async def _try(self) -> bool:
        """Give the request to a replica; return whether its client has the whole answer."""
        age_s = time.monotonic() - self._started_at
        request = self._request._replace(
            attempt=self._num_tries, age_s=age_s, sent=self._sent, is_search=self._is_search
        )
        self._num_tries += 1
        self._replica = None
        # A search makes nobody an owner.
        keys = [] if self._is_search else self._keys
        items = self._replicas.respond(request, keys=keys, avoided=list(self._avoided))
        async with aclosing(items):
            try:
                return await self._read(items)
            except ReplicaLostError:
                return await self._note_loss()
            except (CapacityError, EngineUnavailableError) as error:
                # Refused before any replica had it.
                if not self._may_wait(error.status):
                    raise
                self._refusal = error_body(error)
        await self._pause()
        return False

    # ---- what a replica says --------------------------------------------------------------------

    async def _read(self, items: AsyncGenerator[ResponseItem, None]) -> bool:
        head: ResponseHead | None = None
        held: list[bytes] = []
        async with aclosing(self._with_comments(items)) as commented:
            async for item in commented:
                match item:
                    case None:
                        await self._send_body(KEEP_ALIVE)
                    case NotHeld():
                        return self._search_on(item.replica)
                    case ResponseHead():
                        head, self._replica = item, item.replica
                        self._is_search = False
                    case ResponsePart() if head is not None and _is_stream(head):
                        await self._begin(head)
                        await self._show(item)
                    case ResponsePart():
                        held.append(item.body)
                    case ResponseEnd(is_whole=True) if head is not None:
                        return await self._end(head, b"".join(held))
                    case ResponseEnd():
                        break
        raise ReplicaLostError

    def _with_comments(
        self, items: AsyncGenerator[ResponseItem, None]
    ) -> AsyncGenerator[ResponseItem | None, None]:
        """Yield the items, and None when a stream that waits for them needs a comment.

        The first replica's stream has comments of its own.
        """
        return kept_alive(items, self._keep_alive_s) if self._has_begun else items

    async def _begin(self, head: ResponseHead, length: int | None = None) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        headers: Headers = [one for one in head.headers if one[0].lower() not in _NOT_RETURNED]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        self._stop_waiting()
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def _show(self, part: ResponsePart) -> None:
        """Send a part of a stream."""
        self._stop_waiting()
        if part.body == KEEP_ALIVE:
            await self._send_body(part.body)
            return
        self._num_events += 1
        if self._num_events > self._last_event:
            number = b"id: %d\n" % self._num_events if self._request.held_key else b""
            await self._send_body(number + part.body)
        if part.mark is not None:
            self._sent.add(part.mark)
        self._is_done |= part.body == DONE

    async def _end(self, head: ResponseHead, body: bytes) -> bool:
        """End the response; return False if a replica should be asked again."""
        if _is_stream(head):
            await self._begin(head)
            await self._send_body(is_last=True)
        elif self._is_for_another(head):
            self._avoided.append(head.replica)
            return False
        elif self._may_wait(head.status):
            self._refusal = _read_error(body)
            await self._pause()
            return False
        elif self._has_begun:
            await self._show_error(_read_error(body))
        else:
            await self._begin(head, len(body))
            await self._send_body(body, is_last=True)
        return True

    # ---- what to do about it --------------------------------------------------------------------

    def _search_on(self, replica: str) -> bool:
        """Ask the next replica for the answer; if all were asked, let one compute it."""
        if replica not in self._avoided:
            self._avoided.append(replica)
            return False
        self._avoided.clear()
        self._is_search = False
        if self._last_event:
            raise AnswerNotHeldError
        return False

    def _is_for_another(self, head: ResponseHead) -> bool:
        """Whether a replica refused what another one may take; each is asked once."""
        is_kept_elsewhere = head.status == 404 and self._request.path.startswith(_RESPONSES)
        is_refused = head.status in (429, 503) or is_kept_elsewhere
        return is_refused and head.replica not in self._avoided

    def _may_wait(self, status: int) -> bool:
        """Whether all replicas have refused, but one may soon take it.

        A request that a replica has had waits for room, too: it was admitted once.
        """
        was_taken = self._has_begun or self._num_lost > 0
        refusals = (429, 503) if was_taken else (503,)
        if status not in refusals or not self._request.body:
            return False
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        patience_s = self._patience.lost_s if was_taken else self._patience.refused_s
        return now < self._waits_since + patience_s

    async def _pause(self) -> None:
        self._avoided.clear()
        if self._has_begun and self._keep_alive_s:
            await self._send_body(KEEP_ALIVE)
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._patience.longest_pause_s)

    async def _note_loss(self) -> bool:
        """Count a lost replica; return whether the client has the whole answer already."""
        if self._is_done:
            await self._send_body(is_last=True)
            return True
        self._num_lost += 1
        if self._replica is not None:
            self._avoided.append(self._replica)
        logger.warning("a replica was lost; its request is given to another one")
        if self._num_lost == MAX_LOST:
            raise EngineUnavailableError(
                "the engine was lost several times during this request; try again"
            )
        if self._has_begun and self._timeout is not None:
            # The limit of the request itself holds within replicas, which know its age.
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._patience.lost_s)
        return False

    def _stop_waiting(self) -> None:
        """Note that a replica answers."""
        self._waits_since, self._refusal = None, None
        self._pause_s = self._patience.first_pause_s
        if self._timeout is not None and self._timeout.when() is not None:
            # From here on, the replica's own limit holds.
            self._timeout.reschedule(None)

    # ---- to the client --------------------------------------------------------------------------

    async def _fail(self, error: RequestError) -> None:
        if not self._has_begun:
            raise error
        await self._show_error(error_body(error))

    async def _show_error(self, body: ErrorBody) -> None:
        """End a stream by an error."""
        framing = NAMED_EVENTS if self._request.path.startswith(_RESPONSES) else PLAIN_EVENTS
        await self._send_body(framing.error(body) + framing.end, is_last=True)

    async def _send_body(self, body: bytes = b"", *, is_last: bool = False) -> None:
        message: Any = {"type": "http.response.body", "body": body, "more_body": not is_last}
        await self._send(message)


def _is_stream(head: ResponseHead) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in head.headers
    )


def _read_error(body: bytes) -> ErrorBody:
    """Return the error that a replica answered."""
    try:
        return msgspec.json.decode(body, type=ErrorBody)
    except msgspec.DecodeError:
        return internal_error_body()
