"""The unfinished requests of one engine: sends their messages, and again what an engine lacks.

    committing --> sent       committed, for the present engine
    committing --> waiting    the engine ended meanwhile, or another request is on trial
                              (`suspects`)
    sent --> waiting          the engine reported a cache miss
    sent --> running          the engine sent an output
    sent, running --> waiting the engine ended
    waiting --> committing    there is an engine, and it is the request's turn
    any --> removed           the sequence is finished, aborted, or has failed

A message that is sent again brings the tokens that were generated so far, and the engine goes on
after them. Used by one thread: an event loop's, or that of `LLM`. Commits may block, so they run
wherever `run` lets them; those of messages that are sent again one after the other.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from mmjax.errors import RequestError
from mmjax.frontend.engine_client.suspects import EngineExit, Suspects
from mmjax.frontend.output.output_processor import (
    OutputProcessor,
    ProcessedOutputs,
    SequenceState,
)
from mmjax.frontend.prompt.committer import CommittedMessage, OnCommit, SenderCacheCommitter
from mmjax.frontend.requests.request import ProcessedRequest
from mmjax.system.logger import get_logger
from mmjax.transport.messages import (
    AbortRequests,
    CacheMiss,
    EngineCoreRequest,
    EngineMessage,
    RequestOutputDelta,
)

logger = get_logger(__name__)

MAX_MISSES = 3
"""Cache misses of one message per engine; after all but one of them it is sent inline."""

RunAside = Callable[[Callable[[], None], Callable[[BaseException | None], None]], None]
"""Runs a job, then calls a function with its error in the table's thread; jobs keep their order."""


class RequestTable:
    """All unfinished requests, with what was sent for them and what came of them."""

    def __init__(
        self,
        committer: SenderCacheCommitter,
        tokenizer: Any,
        *,
        send: Callable[[EngineMessage], None],
        fail: Callable[[ProcessedRequest, Exception], None],
        on_commit: OnCommit,
        run: RunAside,
    ) -> None:
        """Without an engine yet: `on_ready` begins.

        Args:
            committer: Completes messages.
            tokenizer: Decodes outputs. Tokenizers are not thread-safe: no other thread may encode
                with it.
            send: Sends to the engine; may report a cache miss before it returns.
            fail: Called for a request that failed, once it is removed.
            on_commit: Called with a message that was completed again: it is for `put`.
            run: See `RunAside`.
        """
        self.outputs = OutputProcessor(tokenizer)
        self._committer = committer
        self._send = send
        self._fail = fail
        self._on_commit = on_commit
        self._run = run
        self._suspects = Suspects()
        self._waiting: dict[str, SequenceState] = {}
        """Sequences by id, in the order in which their messages are completed again."""
        self._is_committing = False
        self._has_engine = False
        self._epoch = committer.epoch
        """Epoch of the engine that is sent to; messages of other epochs are committed again."""

    # ---- requests -------------------------------------------------------------------------------

    def put(self, committed: CommittedMessage) -> None:
        """Send a message; if its epoch is over or others are on trial, commit it again later.

        A message of a removed request is sent, too, and aborted: the sender cache counts on it.
        """
        message = committed.message
        sequence = self.outputs.sequences.get(message.request_id)
        is_current = self._has_engine and committed.epoch == self._epoch
        if is_current and self._has_turn(committed.request):
            if sequence is not None:
                sequence.sending = "sent"
            self._send_message(message)
            if sequence is None:
                self._send(AbortRequests(request_ids=[message.request_id]))
            return
        if is_current:
            self._note(partial(self._committer.revert, message))
        if sequence is not None:
            self._wait(sequence)

    def take(self, deltas: Sequence[RequestOutputDelta]) -> ProcessedOutputs:
        """Return what a step's deltas tell; an error in one request's text ends that one alone."""
        processed = ProcessedOutputs.empty()
        for delta in deltas:
            self.acknowledge(delta.request_id)
            try:
                self.outputs.process(delta, processed)
            except Exception as error:
                logger.exception("outputs of request %s could not be read", delta.request_id)
                self.fail(delta.request_id, error)
        if processed.request_ids_to_abort:
            self._send(AbortRequests(request_ids=processed.request_ids_to_abort))
        for finished in processed.finished:
            if finished.is_last:
                self._clear(finished.request.request_id)
        return processed

    def acknowledge(self, sequence_id: str) -> None:
        """Take note that the engine has a sequence; drop what only its message needed."""
        sequence = self.outputs.sequences.get(sequence_id)
        if sequence is None or sequence.sending != "sent":
            return
        sequence.sending = "running"
        if all(one.sending == "running" for one in sequence.parent.unfinished()):
            sequence.request.release()
            self._clear(sequence.request.request_id)

    def fail(self, sequence_id: str, error: Exception) -> None:
        """Remove the request of a sequence that failed, and tell."""
        sequence = self.outputs.sequences.get(sequence_id)
        if sequence is not None:
            self.remove(sequence.request.request_id)
            self._fail(sequence.request, error)

    def remove(self, request_id: str) -> None:
        """Forget a request, and have the engine abort what runs of it."""
        running = self.outputs.remove(request_id)
        if running:
            self._send(AbortRequests(request_ids=running))
        for sequence_id in running:
            self._waiting.pop(sequence_id, None)
        self._clear(request_id)

    def _clear(self, request_id: str) -> None:
        """Clear a request of suspicion; if it was on trial, go on with the next."""
        self._suspects.clear(request_id)
        self._commit_next()

    # ---- messages that are sent again -----------------------------------------------------------

    def _has_turn(self, request: ProcessedRequest) -> bool:
        return self._suspects.on_trial in (None, request.request_id)

    def _wait(self, sequence: SequenceState) -> None:
        sequence.sending = "waiting"
        self._waiting[sequence.sequence_id] = sequence
        self._commit_next()

    def _commit_next(self) -> None:
        """Complete what waits of the next request: of the one that is on trial, else of any."""
        if self._is_committing or not self._has_engine:
            return
        due = (one for one in self._waiting.values() if self._has_turn(one.request))
        first = next(due, None)
        if first is None:
            return
        request = first.request
        # In one job, so that its sequences reach the engine together.
        sequences = [one for one in first.parent.sequences if one.sequence_id in self._waiting]
        for sequence in sequences:
            del self._waiting[sequence.sequence_id]
            sequence.sending = "committing"
            message, output = request.messages[sequence.index], list(sequence.token_ids)
            request.messages[sequence.index] = msgspec.structs.replace(
                message, output_token_ids=output
            )
        commit = partial(
            self._committer.commit,
            request,
            self._on_commit,
            indices=[sequence.index for sequence in sequences],
            is_inline=max(sequence.num_misses for sequence in sequences) >= MAX_MISSES,
        )
        self._is_committing = True
        self._run(commit, partial(self._end_commit, request))

    def _end_commit(self, request: ProcessedRequest, error: BaseException | None) -> None:
        self._is_committing = False
        if isinstance(error, Exception):
            if not isinstance(error, RequestError):
                logger.error("%s cannot be sent again", request.request_id, exc_info=error)
            for message in request.messages:
                sequence = self.outputs.sequences.get(message.request_id)
                if sequence is not None and sequence.request is request:
                    self.fail(message.request_id, error)
        self._commit_next()

    def _send_message(self, message: EngineCoreRequest) -> None:
        try:
            self._send(message)
        except Exception as error:
            logger.exception("request %s could not be sent to the engine", message.request_id)
            self._note(partial(self._committer.revert, message))
            self.fail(message.request_id, error)

    def _note(self, update: Callable[[], None]) -> None:
        self._run(update, _log_failure)

    # ---- events of the engine -------------------------------------------------------------------

    def on_miss(self, miss: CacheMiss) -> None:
        """Commit a message again, with the items that the engine lacks."""
        self._note(partial(self._committer.invalidate, miss.mm_hashes, self._epoch))
        sequence = self.outputs.sequences.get(miss.request_id)
        if sequence is None or sequence.sending != "sent":
            return
        sequence.num_misses += 1
        logger.info("P1 lacks %d items of request %s", len(miss.mm_hashes), miss.request_id)
        if sequence.num_misses <= MAX_MISSES:
            self._wait(sequence)
            return
        text = (
            f"request {miss.request_id} came {sequence.num_misses} times with all of its tensors, "
            f"and still the engine lacks {', '.join(miss.mm_hashes)}; switch the cache off with "
            "`mm_processor_cache_gb=0`"
        )
        logger.error(text)
        self.fail(miss.request_id, RuntimeError(text))

    def on_exit(self, engine_exit: EngineExit) -> ProcessedRequest | None:
        """Let all requests wait for the next engine.

        Returns the request that has ended this one, if that is certain; its caller removes it.
        """
        self._reset_engine(has_engine=False)
        self._waiting = {}
        for sequence_id, sequence in self.outputs.sequences.items():
            if sequence.sending != "committing":
                sequence.sending = "waiting"
                self._waiting[sequence_id] = sequence
        sequences = map(self.outputs.sequences.get, engine_exit.request_ids)
        computed = {one.request.request_id: one.request for one in sequences if one is not None}
        culprit = self._suspects.on_exit(computed, engine_exit.cause)
        if self._suspects.on_trial is not None:
            logger.warning("request %s is tried alone first", self._suspects.on_trial)
        return None if culprit is None else computed[culprit]

    def on_ready(self) -> None:
        """Send to a new engine, which holds nothing, also what was committed before it came."""
        self._reset_engine(has_engine=True)
        for sequence in self.outputs.sequences.values():
            sequence.num_misses = 0
        self._commit_next()

    def _reset_engine(self, *, has_engine: bool) -> None:
        self._has_engine = has_engine
        # As the committer's, which counts in the order of these jobs.
        self._epoch += 1
        self._note(self._committer.reset_engine)


def _log_failure(error: BaseException | None) -> None:
    if error is not None:
        # If the caches differ now, cache misses repair that.
        logger.error("P0's view of the engine's caches could not be changed", exc_info=error)
