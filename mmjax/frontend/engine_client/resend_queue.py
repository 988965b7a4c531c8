"""Messages on their way to P1, until the first answer; and again, where P1 lost what they need.

    committing --> sent       the thread is done, and P1 still the one that it was done for
    committing --> waiting    P1 died meanwhile
    sent --> committing       P1 lacks items
    sent --> waiting          P1 died
    waiting --> committing    there is a new P1
    sent --> gone             P1 gave the first output

Lives in the event loop; commits, and whatever else takes the ledger's lock, run in threads.
"""

import asyncio
import enum
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from mmjax.errors import RequestError
from mmjax.frontend.engine_client.committer import Ledger
from mmjax.frontend.engine_client.requests import Delivery, ProcessedRequest
from mmjax.logger import get_logger
from mmjax.transport.messages import AbortRequests, CacheMiss, EngineCoreRequest, EngineMessage

logger = get_logger(__name__)

MAX_MISSES = 3
"""Of one message in one life of P1; after the last but one it brings all of its tensors."""


class _State(enum.Enum):
    COMMITTING = enum.auto()
    """A thread completes the message."""
    SENT = enum.auto()
    """P1 has it, or will."""
    WAITING = enum.auto()
    """There is no P1 to send it to."""


@dataclass(slots=True, kw_only=True)
class _Parcel:
    request: ProcessedRequest
    index: int
    state: _State = _State.COMMITTING
    num_misses: int = 0

    @property
    def message_id(self) -> str:
        return self.request.messages[self.index].request_id


class Courier:
    """Sends committed messages in order, and sees to it that P1 can take each of them in."""

    def __init__(
        self,
        ledger: Ledger,
        send: Callable[[EngineMessage], None],
        fail: Callable[[str, Exception], None],
    ) -> None:
        """`send` queues a message for P1; `fail` answers a sequence that cannot be completed."""
        self._ledger = ledger
        self._send = send
        self._fail = fail
        self._parcels: dict[str, _Parcel] = {}
        self._has_engine = False
        self._epoch = 0
        """Which P1 is sent to: what was made for another one is not for it."""
        self._num_lives = 0
        """Deaths and births that were heard of."""
        # One thread: notes are taken in the order of what they note.
        self._notes = ThreadPoolExecutor(1, thread_name_prefix="mmjax-notes")
        # Its own thread: what P1 waits for goes before what nobody has begun.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mmjax-resend")

    def close(self) -> None:
        """End the thread; what it does meanwhile goes nowhere."""
        self._parcels.clear()
        for thread in (self._notes, self._thread):
            thread.shutdown(wait=False, cancel_futures=True)

    # ---- a message's way ------------------------------------------------------------------------

    def expect(self, request: ProcessedRequest) -> None:
        """Learn of a request whose messages are being committed."""
        for index in range(len(request.messages)):
            parcel = _Parcel(request=request, index=index)
            self._parcels[parcel.message_id] = parcel

    def deliver(self, delivery: Delivery) -> None:
        """Send a message; if its P1 is gone, have it completed for the next one.

        A message of a request that was forgotten is sent as well, and taken back: P0's notes say
        that P1 has seen it.
        """
        message_id = delivery.message.request_id
        parcel = self._parcels.get(message_id)
        is_sendable = self._has_engine and delivery.epoch == self._epoch
        if is_sendable:
            self._send(delivery.message)
            if parcel is None:
                self._send(AbortRequests(request_ids=[message_id]))
        if parcel is not None:
            parcel.state = _State.SENT if is_sendable else _State.WAITING
            if self._has_engine and not is_sendable:
                self._commit_again(parcel)

    def acknowledge(self, message_id: str) -> None:
        """Learn that P1 has answered: its tensors are needed no more."""
        parcel = self._parcels.pop(message_id, None)
        if parcel is None:
            return
        request = parcel.request
        if not any(message.request_id in self._parcels for message in request.messages):
            request.release()

    def forget(self, request: ProcessedRequest) -> None:
        """Learn that nobody waits for a request any more."""
        for message in request.messages:
            self._parcels.pop(message.request_id, None)

    def take_back(self, message: EngineCoreRequest) -> None:
        """Learn that a message was not sent, and never will be."""
        self._note(partial(self._ledger.take_back, message))

    # ---- what P1 says and does ------------------------------------------------------------------

    def on_miss(self, miss: CacheMiss) -> None:
        """Send a message again, with the items that P1 lacks."""
        noted = self._note(partial(self._ledger.invalidate, miss.mm_hashes, self._epoch))
        parcel = self._parcels.get(miss.request_id)
        if parcel is None or parcel.state is not _State.SENT:
            return
        parcel.num_misses += 1
        logger.info("P1 lacks %d items of request %s", len(miss.mm_hashes), miss.request_id)
        if parcel.num_misses > MAX_MISSES:
            logger.error("P1 lacks items that request %s has brought", miss.request_id)
            self._fail(miss.request_id, RuntimeError("P1 lost the request's items"))
        else:
            parcel.state = _State.COMMITTING
            noted.add_done_callback(lambda _: self._commit_again(parcel))

    def on_death(self) -> None:
        """Learn that P1 is gone, and all that it held."""
        self._has_engine = False
        self._num_lives += 1
        self._note(self._ledger.forget_engine)
        for parcel in self._parcels.values():
            if parcel.state is _State.SENT:
                parcel.state = _State.WAITING

    def on_ready(self) -> None:
        """Send what waits for a P1, once nothing is noted of the last one."""
        self._num_lives += 1
        begin = partial(call_in_loop, asyncio.get_running_loop(), self._begin, self._num_lives)
        # Once more: what was committed since the last one's death has not been sent.
        self._note(partial(self._ledger.forget_engine, begin))

    def _begin(self, life: int, epoch: int) -> None:
        if life != self._num_lives:
            return
        self._epoch = epoch
        self._has_engine = True
        for parcel in list(self._parcels.values()):
            if parcel.state is _State.WAITING:
                parcel.num_misses = 0
                self._commit_again(parcel)

    # ---- in the threads -------------------------------------------------------------------------

    def _note(self, take_note: Callable[[], None]) -> "asyncio.Future[None]":
        noted = asyncio.get_running_loop().run_in_executor(self._notes, take_note)
        noted.add_done_callback(_log_failure)
        return noted

    def _commit_again(self, parcel: _Parcel) -> None:
        if self._parcels.get(parcel.message_id) is not parcel:
            return
        parcel.state = _State.COMMITTING
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(
            self._thread,
            partial(
                self._ledger.commit,
                parcel.request,
                partial(call_in_loop, loop, self.deliver),
                indices=[parcel.index],
                is_inline=parcel.num_misses >= MAX_MISSES,
            ),
        )
        future.add_done_callback(partial(self._finish, parcel))

    def _finish(self, parcel: _Parcel, future: "asyncio.Future[None]") -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None or self._parcels.get(parcel.message_id) is not parcel:
            return
        if not isinstance(error, RequestError):
            logger.error("request %s cannot be sent again", parcel.message_id, exc_info=error)
        self._fail(parcel.message_id, error if isinstance(error, Exception) else RuntimeError())


def _log_failure(noted: "asyncio.Future[None]") -> None:
    error = None if noted.cancelled() else noted.exception()
    if error is not None:
        # What the caches differ in heals by misses.
        logger.error("P0's notes of the engine's caches could not be changed", exc_info=error)


def call_in_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object
) -> None:
    """Call a function in the loop, after all that was handed to it before."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
