"""Sends messages to P1 in the order of their commits, and again after a cache miss or a restart.

    committing --> sent       committed, and P1 has not restarted meanwhile
    committing --> waiting    P1 ended meanwhile
    committing --> held       as before, but another request is on trial (`suspects`)
    held --> sent             no request is on trial any longer
    sent --> committing       P1 reported a cache miss
    sent --> running          P1 sent an output
    any but committing --> waiting    P1 ended
    waiting --> committing    P1 was restarted, and it is the request's turn
    any --> removed           the sequence is finished, aborted, or has failed

A message that is sent again brings the tokens that the former P1 generated.

Runs in the event loop; all that takes the committer's lock runs in threads.
"""

import asyncio
import enum
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec

from mmjax.errors import RequestError
from mmjax.frontend.engine_client.committer import CommittedMessage, SenderCacheCommitter
from mmjax.frontend.engine_client.requests import ProcessedRequest
from mmjax.frontend.engine_client.suspects import EngineExit, Suspects
from mmjax.system.logger import get_logger
from mmjax.transport.messages import AbortRequests, CacheMiss, EngineCoreRequest, EngineMessage

logger = get_logger(__name__)

MAX_MISSES = 3
"""Cache misses of one message per P1; after all but one of them it is sent inline."""


class _State(enum.Enum):
    COMMITTING = enum.auto()
    """A thread completes the message."""
    HELD = enum.auto()
    """Committed; it waits until no request is on trial."""
    SENT = enum.auto()
    """Sent, or queued in the socket."""
    RUNNING = enum.auto()
    """P1 has sent an output."""
    WAITING = enum.auto()
    """Waits for a restarted P1."""


@dataclass(slots=True, kw_only=True)
class PendingMessage:
    """The message of an unfinished sequence."""

    request: ProcessedRequest
    index: int
    """Which of the request's sequences."""
    state: _State = _State.COMMITTING
    num_misses: int = 0

    @property
    def message_id(self) -> str:
        """Id of the sequence."""
        return self.request.messages[self.index].request_id


class ResendQueue:
    """Sends messages in order, and resends those that P1 could not admit."""

    def __init__(
        self,
        committer: SenderCacheCommitter,
        send: Callable[[EngineMessage], Awaitable[None]],
        fail: Callable[[str, Exception], None],
        get_output: Callable[[str], list[int]],
    ) -> None:
        """Start nothing yet.

        Args:
            committer: Completes messages.
            send: Sends to P1.
            fail: Called for a sequence whose message cannot be sent.
            get_output: Returns a sequence's tokens so far.
        """
        self._committer = committer
        self._send = send
        self._fail = fail
        self._get_output = get_output
        self.suspects = Suspects()
        self._held: list[CommittedMessage] = []
        """In the order of their commits."""
        self._queue: asyncio.Queue[EngineMessage] = asyncio.Queue()
        self._send_task: asyncio.Task[None] | None = None
        self._pending: dict[str, PendingMessage] = {}
        self._has_engine = False
        self._epoch = 0
        """Epoch of the P1 that is sent to; messages of other epochs are committed again."""
        self._num_transitions = 0
        """Ends and starts of P1 so far."""
        # One thread: the committer's updates keep the order of P1's events.
        self._notes = ThreadPoolExecutor(1, thread_name_prefix="mmjax-notes")
        # A thread of its own, so that resent messages do not wait for new requests.
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="mmjax-resend")

    def start(self) -> None:
        """Start to send, in the running event loop."""
        self._send_task = asyncio.create_task(self._send_all(), name="send-messages")

    async def stop(self) -> None:
        """Stop sending; queued messages stay unsent."""
        if self._send_task is not None:
            self._send_task.cancel()
            await asyncio.gather(self._send_task, return_exceptions=True)

    def close(self) -> None:
        """End the threads; their results are dropped."""
        self._pending.clear()
        for thread in (self._notes, self._commits):
            thread.shutdown(wait=False, cancel_futures=True)

    # ---- messages -------------------------------------------------------------------------------

    def put(self, message: EngineMessage) -> None:
        """Queue a message that needs no commit."""
        self._queue.put_nowait(message)

    def add(self, request: ProcessedRequest) -> None:
        """Track a request whose messages are being committed."""
        for index in range(len(request.messages)):
            pending = PendingMessage(request=request, index=index)
            self._pending[pending.message_id] = pending

    def put_committed(self, committed: CommittedMessage) -> None:
        """Queue a message; if its epoch is over, commit it again.

        A message of a discarded request is sent, too, and aborted: the sender cache counts on it.
        """
        pending = self._pending.get(committed.message.request_id)
        if self._has_engine and committed.epoch == self._epoch:
            if self.suspects.on_trial in (None, committed.request.request_id):
                self._put_or_abort(committed)
            else:
                self._held.append(committed)
                _set_state(pending, _State.HELD)
        elif pending is not None:
            pending.state = _State.WAITING
            if self._has_engine:
                self._send_waiting()

    def _put_or_abort(self, committed: CommittedMessage) -> None:
        pending = self._pending.get(committed.message.request_id)
        self.put(committed.message)
        _set_state(pending, _State.SENT)
        if pending is None:
            self.put(AbortRequests(request_ids=[committed.message.request_id]))

    def acknowledge(self, message_id: str) -> None:
        """Take note of an output of a sequence."""
        pending = self._pending.get(message_id)
        if pending is None or pending.state is not _State.SENT:
            return
        pending.state = _State.RUNNING
        request = pending.request
        others = [self._pending.get(message.request_id) for message in request.messages]
        if all(one is None or one.state is _State.RUNNING for one in others):
            request.release()
            self._acquit(request)

    def finish(self, message_id: str) -> None:
        """Stop tracking a sequence, which is finished."""
        pending = self._pending.pop(message_id, None)
        if pending is not None and not self._is_tracked(pending.request):
            self._acquit(pending.request)

    def discard(self, request: ProcessedRequest) -> None:
        """Stop tracking a request, which was aborted or has failed."""
        for message in request.messages:
            self._pending.pop(message.request_id, None)
        self._acquit(request)

    def _is_tracked(self, request: ProcessedRequest) -> bool:
        return any(message.request_id in self._pending for message in request.messages)

    def _acquit(self, request: ProcessedRequest) -> None:
        """Clear a request of suspicion; if it was on trial, go on with the next."""
        was_tried = self.suspects.on_trial == request.request_id
        self.suspects.acquit(request.request_id)
        if was_tried and self._has_engine:
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send what waits: the request that is on trial, else all."""
        tried = self.suspects.on_trial
        if tried is None:
            held, self._held = self._held, []
            for committed in held:
                self._put_or_abort(committed)
        for pending in list(self._pending.values()):
            is_due = tried in (None, pending.request.request_id)
            if pending.state is _State.WAITING and is_due:
                self._commit_again(pending)

    async def _send_all(self) -> None:
        while True:
            message = await self._queue.get()
            try:
                await self._send(message)
            except Exception as error:
                logger.exception("a message could not be sent to P1")
                if isinstance(message, EngineCoreRequest):
                    self._fail_unsent(message, error)

    def _fail_unsent(self, message: EngineCoreRequest, error: Exception) -> None:
        try:
            self._note(partial(self._committer.revert, message))
            self._fail(message.request_id, error)
        except Exception:
            # Go on with the next messages.
            logger.exception("request %s could not be taken back", message.request_id)

    # ---- events of P1 ---------------------------------------------------------------------------

    def on_miss(self, miss: CacheMiss) -> None:
        """Commit a message again, with the items that P1 lacks."""
        noted = self._note(partial(self._committer.invalidate, miss.mm_hashes, self._epoch))
        pending = self._pending.get(miss.request_id)
        if pending is None or pending.state is not _State.SENT:
            return
        pending.num_misses += 1
        logger.info("P1 lacks %d items of request %s", len(miss.mm_hashes), miss.request_id)
        if pending.num_misses > MAX_MISSES:
            logger.error("P1 lacks items that request %s has brought", miss.request_id)
            self._fail(miss.request_id, RuntimeError("P1 lost the request's items"))
        else:
            pending.state = _State.COMMITTING
            noted.add_done_callback(lambda _: self._commit_again(pending))

    def on_exit(self, engine_exit: EngineExit) -> ProcessedRequest | None:
        """Drop queued messages; all tracked ones are sent to the next P1 after `on_ready`.

        Returns the request that has ended P1, if that is certain; its caller must discard it.
        """
        while not self._queue.empty():
            self._queue.get_nowait()
        self._held.clear()
        self._has_engine = False
        self._num_transitions += 1
        self._note(self._committer.reset_engine)
        for pending in self._pending.values():
            if pending.state is not _State.COMMITTING:
                pending.state = _State.WAITING
        return self._find_culprit(engine_exit)

    def _find_culprit(self, engine_exit: EngineExit) -> ProcessedRequest | None:
        ids = engine_exit.request_ids
        computed = [self._pending[one].request for one in ids if one in self._pending]
        by_id = {request.request_id: request for request in computed}
        convicted = self.suspects.on_exit(by_id, engine_exit.cause)
        if self.suspects.on_trial is not None:
            logger.warning("request %s is tried alone first", self.suspects.on_trial)
        return None if convicted is None else by_id[convicted]

    def on_ready(self) -> None:
        """Commit waiting messages again, in a new epoch."""
        self._num_transitions += 1
        loop = asyncio.get_running_loop()
        begin = partial(call_in_loop, loop, self._begin, self._num_transitions)
        # Again: messages committed since the last P1's end have not been sent.
        self._note(partial(self._committer.reset_engine, begin))

    def _begin(self, transition: int, epoch: int) -> None:
        if transition != self._num_transitions:
            return
        self._epoch = epoch
        self._has_engine = True
        for pending in self._pending.values():
            pending.num_misses = 0
        self._send_waiting()

    # ---- in the threads -------------------------------------------------------------------------

    def _note(self, update: Callable[[], None]) -> "asyncio.Future[None]":
        noted = asyncio.get_running_loop().run_in_executor(self._notes, update)
        noted.add_done_callback(_log_failure)
        return noted

    def _commit_again(self, pending: PendingMessage) -> None:
        if self._pending.get(pending.message_id) is not pending:
            return
        pending.state = _State.COMMITTING
        messages, index = pending.request.messages, pending.index
        output = self._get_output(pending.message_id)
        messages[index] = msgspec.structs.replace(messages[index], output_token_ids=output)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(
            self._commits,
            partial(
                self._committer.commit,
                pending.request,
                partial(call_in_loop, loop, self.put_committed),
                indices=[pending.index],
                is_inline=pending.num_misses >= MAX_MISSES,
            ),
        )
        future.add_done_callback(partial(self._finish, pending))

    def _finish(self, pending: PendingMessage, future: "asyncio.Future[None]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None or self._pending.get(pending.message_id) is not pending:
            return
        if not isinstance(error, RequestError):
            logger.error("request %s cannot be sent again", pending.message_id, exc_info=error)
        self._fail(pending.message_id, error if isinstance(error, Exception) else RuntimeError())


def _set_state(pending: PendingMessage | None, state: _State) -> None:
    if pending is not None:
        pending.state = state


def _log_failure(noted: "asyncio.Future[None]") -> None:
    error = None if noted.cancelled() else noted.exception()
    if error is not None:
        # If the caches differ now, cache misses repair that.
        logger.error("P0's view of the engine's caches could not be changed", exc_info=error)


def call_in_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object
) -> None:
    """Call a function in the loop, in the order of these calls; from any thread."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
