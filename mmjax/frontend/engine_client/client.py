"""The asyncio client of the engine: add requests, read their outputs, abort them."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mmjax.config.engine_config import LoRAConfig, SchedulerConfig, SchedulingPolicy
from mmjax.errors import (
    EngineUnavailableError,
    InternalError,
    RequestError,
    RequestQuarantinedError,
    RequestTimeoutError,
)
from mmjax.frontend.engine_client.admission import Capacity, Quarantine
from mmjax.frontend.engine_client.control import AdapterClient, ControlClient
from mmjax.frontend.engine_client.request_stream import RequestObserver, RequestStream
from mmjax.frontend.engine_client.request_table import RequestTable
from mmjax.frontend.engine_client.stats_log import StatsLog
from mmjax.frontend.engine_client.supervisor import EngineLink
from mmjax.frontend.engine_client.suspects import EngineExit
from mmjax.frontend.output.output_processor import ProcessedOutputs
from mmjax.frontend.prompt.committer import CommittedMessage
from mmjax.frontend.prompt.explain import Explanation
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.prompt.processor_pool import RequestThreads
from mmjax.frontend.requests.prompts import PromptType
from mmjax.frontend.requests.request import GenerateRequest, ProcessedRequest, PromptSource
from mmjax.processing.media.decode_budget import Cancellation
from mmjax.system.logger import get_logger
from mmjax.system.loop_calls import LoopCalls
from mmjax.system.request_times import RequestTimes, measuring, recording
from mmjax.transport.messages import (
    AdapterLoaded,
    CacheMiss,
    ControlAction,
    EngineChanged,
    EngineEvent,
    RequestFailed,
    StepOutput,
)

logger = get_logger(__name__)

T = TypeVar("T")

_EXPIRY_GRACE_S = 1.0
"""Seconds after its deadline in which P1, which expires requests between steps, may still do so."""


@dataclass(slots=True, kw_only=True)
class PendingRequest:
    """A request that is being processed in a thread."""

    cancellation: Cancellation = field(default_factory=Cancellation)
    """Set when the client has left."""
    stream: RequestStream | None = None
    """Once its first message is committed."""
    release_tokens: Callable[[], None] = lambda: None
    """Gives back the room for its prompt, which is counted by its stream from then on."""
    times: RequestTimes = field(default_factory=lambda: RequestTimes(arrived_at=time.monotonic()))


class AsyncEngineClient:
    """P0's client of the engine."""

    def __init__(
        self,
        input_processor: InputProcessor,
        supervisor: EngineLink,
        scheduler: SchedulerConfig,
        *,
        lora: LoRAConfig | None = None,
        num_workers: int = 2,
        max_start_wait_s: float = 300.0,
        quarantine_s: float = 600.0,
    ) -> None:
        """Serve through `supervisor`.

        Args:
            input_processor: Makes messages of prompts.
            supervisor: Owns the engine.
            scheduler: Says how many requests are admitted.
            lora: The engine's adapters, if it has any.
            num_workers: Threads that process prompts.
            max_start_wait_s: For how long requests wait for the engine's first start.
            quarantine_s: For how long a request that ended the engine is refused; 0: not at all.
        """
        self.input_processor = input_processor
        self.supervisor = supervisor
        self.scheduling_policy: SchedulingPolicy = scheduler.scheduling_policy
        self.max_num_seqs = scheduler.max_num_seqs
        self.capacity = Capacity(scheduler.max_num_unfinished_seqs, scheduler.max_num_queued_tokens)
        self._num_workers = num_workers
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="mmjax-grammar")
        # One thread: updates of the caches keep the order of the engine's events.
        self._table_thread = ThreadPoolExecutor(1, thread_name_prefix="mmjax-resend")
        self._streams: dict[str, RequestStream] = {}
        self._observers: list[RequestObserver] = []
        self._max_start_wait_s = max_start_wait_s
        mm_cache = input_processor.cache
        self._stats_log = StatsLog(
            lambda: supervisor.heartbeat, None if mm_cache is None else mm_cache.make_stats
        )
        self.requests = RequestTable(
            input_processor.committer,
            input_processor.tokenizer,
            send=supervisor.send,
            fail=self._fail,
            on_commit=lambda committed: self._calls.call(self.requests.put, committed),
            run=self._run_aside,
        )
        self._quarantine = Quarantine(quarantine_s)
        modules = {} if lora is None else dict(lora.modules)
        self.adapters = AdapterClient(modules, put=supervisor.send)
        self.control = ControlClient(put=supervisor.send)

    def observe(self, observer: RequestObserver) -> None:
        """Tell `observer` about all requests from now on."""
        self._observers.append(observer)

    async def start(self) -> None:
        """Connect to P1, without waiting until it is ready."""
        self._loop = asyncio.get_running_loop()
        self._calls = LoopCalls(self._loop)
        self._threads = RequestThreads(self._num_workers, self._calls)
        await self.supervisor.start(self)
        self._stats_log.start()

    async def close(self) -> None:
        """End P1 and the threads."""
        await self._stats_log.close()
        await self.supervisor.close()
        self._threads.close()
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)
        # In threads: others may still hold the caches' locks.
        await asyncio.to_thread(self._table_thread.shutdown, cancel_futures=True)
        await asyncio.to_thread(self.input_processor.close)

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served: P1 is ready, sends heartbeats, and has its weights."""
        return self.supervisor.is_healthy and self.control.weights_error is None

    @property
    def num_requests(self) -> int:
        """Requests that are being processed, wait or run."""
        return self.capacity.num_requests

    @property
    def num_processing(self) -> int:
        """Requests that are being processed."""
        return self.capacity.num_requests - len(self._streams)

    async def add_request(self, request: GenerateRequest) -> RequestStream:
        """Admit and process a request; raises RequestError before anything is streamed."""
        params = request.sampling_params
        # Before any decoding, so that refusing is cheap under overload.
        self.capacity.enter(params.n)
        pending = PendingRequest()
        try:
            await self._wait_for_start(request.deadline)
            if self.control.weights_error is not None:
                raise self._unavailable()
            if (structure := params.structured_outputs) is not None:
                # In a thread of its own, so that a slow one delays no request without; `prepare`
                # finds it read.
                read = self.input_processor.grammars.read
                await self._loop.run_in_executor(self._grammar_thread, read, structure)
            job = partial(self._process, pending, request)
            await self._run(
                job, request.prompt, pending.cancellation, pending.times, request.deadline
            )
        except BaseException:
            pending.cancellation.set()
            if pending.stream is not None:
                self.abort(request.request_id)
            raise
        finally:
            if pending.stream is None:
                self.capacity.leave(params.n)
            pending.release_tokens()
        if pending.stream is None:
            raise self._unavailable()
        return pending.stream

    async def load_adapter(self, lora_name: str, path: Path) -> None:
        """Load an adapter from a directory, which requests may name then; RequestError."""
        await self._wait_for_start(None)
        await self.adapters.load(lora_name, path)

    async def change_engine(self, action: ControlAction, **options: Any) -> None:
        """Change the engine as a whole, between two steps, as `ControlClient.change` does."""
        await self._wait_for_start(None)
        await self.control.change(action, **options)

    async def explain(
        self, prompt: PromptSource, *, id_domain: str | None = None, is_bounded: bool = True
    ) -> Explanation:
        """Process a prompt, and describe the result; counts as a request meanwhile.

        Without `is_bounded`, the prompt may be too long for the model.
        """
        explain = partial(self.input_processor.explain, id_domain=id_domain, is_bounded=is_bounded)
        return await self._work(prompt, explain)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids; counts as a request meanwhile."""
        tokenize = self.input_processor.tokenize
        return await self._work(
            text, lambda _, **__: tokenize(text, add_special_tokens=add_special_tokens)
        )

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of token ids; counts as a request meanwhile."""
        return await self._work("", lambda _, **__: self.input_processor.detokenize(token_ids))

    async def _work(self, prompt: PromptSource, job: Callable[..., T]) -> T:
        """Run a job on a prompt in a thread for requests."""
        self.capacity.enter(1)
        pending = PendingRequest()
        try:
            return await self._run(job, prompt, pending.cancellation, pending.times)
        finally:
            pending.cancellation.set()
            self.capacity.leave(1)

    def abort(self, request_id: str) -> None:
        """Abort a request, here and in P1."""
        self._end(request_id, None)

    # ---- EngineListener -------------------------------------------------------------------------

    def on_message(self, message: EngineEvent) -> None:
        """Put a step's outputs into their streams."""
        match message:
            case AdapterLoaded():
                self.adapters.on_loaded(message)
            case EngineChanged():
                self.control.on_changed(message)
                if self.control.weights_error is not None:
                    self._end_all()
            case RequestFailed():
                self.requests.fail(message.request_id, message.to_error())
            case CacheMiss():
                self.requests.on_miss(message)
            case StepOutput():
                self._pass_on(self.requests.take(message.deltas))

    def on_exit(self, engine_exit: EngineExit) -> None:
        """Let all requests wait for the next P1, but for one that has ended this one.

        If there will be none, or not soon, all fail.
        """
        culprit = self.requests.on_exit(engine_exit)
        self.adapters.on_exit()
        self.control.on_exit()
        if culprit is not None:
            logger.error("request %s ended the engine process; it fails", culprit.request_id)
            self._quarantine.add(culprit)
            self._end(culprit.request_id, RequestQuarantinedError())
        if self.supervisor.state != "restarting":
            self._end_all()

    def on_ready(self) -> None:
        """Send all unfinished requests again, with what was generated for them."""
        # Before what they compute.
        self.control.on_ready()
        # Before the requests that name them.
        self.adapters.on_ready()
        self.requests.on_ready()

    # ---- processing -----------------------------------------------------------------------------

    async def _run(
        self,
        job: Callable[..., T],
        prompt: PromptSource,
        cancellation: Cancellation,
        times: RequestTimes,
        deadline: float | None = None,
    ) -> T:
        """Make the prompt and run `job` on it, in a thread; fetch its media in between.

        What has much to decode, by its files' headers, goes on in a thread for heavy work.
        """
        connector = self.input_processor.connector

        def start(prompt: PromptSource) -> tuple[PromptType, list[T]]:
            """Return the prompt, and the job's result if it could be done at once."""
            times.wait_until(time.monotonic())
            with recording(times):
                made = prompt() if callable(prompt) else prompt
                is_ready = connector.is_whole(made) and not connector.is_heavy(made)
            return made, [job(made, cancellation=cancellation)] if is_ready else []

        def finish() -> T:
            times.wait_until(time.monotonic())
            return job(made, cancellation=cancellation)

        made, done = await self._threads.run(partial(start, prompt), cancellation)
        async with AsyncExitStack() as stack:
            if not connector.is_whole(made):
                await stack.enter_async_context(_until(deadline))
                with recording(times), measuring("fetch"):
                    made = await stack.enter_async_context(connector.fetched(made))
                made, done = await self._threads.run(partial(start, made), cancellation)
            if done:
                return done[0]
            return await self._threads.run(finish, cancellation, is_heavy=True)

    def _process(
        self,
        pending: PendingRequest,
        request: GenerateRequest,
        prompt: PromptType,
        *,
        cancellation: Cancellation,
    ) -> None:
        """Process a prompt, in a thread; pass its messages to the loop as they are committed."""
        with recording(pending.times):
            made = replace(request, prompt=prompt)
            processed = self.input_processor.prepare(made, cancellation=cancellation)
            self._quarantine.check(processed)
            pending.release_tokens = self.capacity.reserve_tokens(
                len(processed.prompt_token_ids) * len(processed.messages),
                lambda: self.requests.outputs.num_queued_tokens,
            )
            if pending.cancellation.is_set:
                # Nobody waits any more who would release it.
                pending.release_tokens()
            else:
                self.input_processor.committer.commit(
                    processed,
                    lambda committed: self._calls.call(self._on_committed, pending, committed),
                )

    def _on_committed(self, pending: PendingRequest, committed: CommittedMessage) -> None:
        """Send a message from a thread; the first one registers the request.

        No later one: without its first sequence a request would never end.
        """
        has_engine = self.supervisor.state not in ("paused", "dead")
        can_serve = has_engine and self.control.weights_error is None
        if committed.index == 0 and not pending.cancellation.is_set and can_serve:
            pending.stream = self._register(committed.request)
        self.requests.put(committed)

    def _register(self, request: ProcessedRequest) -> RequestStream:
        stream = self._streams[request.request_id] = RequestStream(request, self.abort)
        brought = self.requests.outputs.add_request(request)
        self._tell(stream, lambda observer: observer.on_added(request))
        deadline = request.messages[0].deadline
        if deadline is not None:
            error = RequestTimeoutError()
            stream.expiry = self._loop.call_later(
                deadline - time.monotonic() + _EXPIRY_GRACE_S, self._end, request.request_id, error
            )
        self._pass_on(brought)
        return stream

    # ---- outputs and ends -----------------------------------------------------------------------

    def _pass_on(self, processed: ProcessedOutputs) -> None:
        """Tell observers and streams of outputs; forget what they finish."""
        if self._observers:
            if processed.new_tokens:
                self._tell_all(lambda observer: observer.on_tokens(processed.new_tokens))
            for ended in processed.finished:
                stream = self._streams.get(ended.request.request_id)
                self._tell(stream, lambda observer, ended=ended: observer.on_finished(ended))
        for output in processed.request_outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.finished:
                    self._forget(output.request_id)

    def _end(self, request_id: str, error: RequestError | None) -> None:
        """End a request, here and in P1: whoever reads it gets `error`; None: nobody does."""
        stream = self._forget(request_id)
        if stream is None:
            return
        self.requests.remove(request_id)
        reason = "abort" if error is None else "error"
        self._tell(stream, lambda observer: observer.on_broken_off(stream.request, reason))
        if error is not None:
            stream.put(error)

    def _end_all(self) -> None:
        """End all requests, which nothing serves any more."""
        for request_id in list(self._streams):
            self._end(request_id, self._unavailable())

    def _fail(self, request: ProcessedRequest, error: Exception) -> None:
        if not isinstance(error, RequestError) or isinstance(error, InternalError):
            # Details are for the log, not for the client.
            error = InternalError("the engine failed on this request; the log says why")
        self._end(request.request_id, error)

    def _forget(self, request_id: str) -> RequestStream | None:
        """Count a request no longer, finished or not; return its stream."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.capacity.leave(len(stream.request.messages))
            if stream.expiry is not None:
                stream.expiry.cancel()
        return stream

    def _tell(self, stream: RequestStream | None, call: Callable[[RequestObserver], None]) -> None:
        """Tell observers of a request, in its context."""
        if stream is not None:
            stream.context.run(self._tell_all, call)

    def _tell_all(self, call: Callable[[RequestObserver], None]) -> None:
        """Tell observers; their faults are none of the requests'."""
        for observer in self._observers:
            try:
                call(observer)
            except Exception:
                logger.exception("an observer of requests failed")

    # ---- waits and threads ----------------------------------------------------------------------

    async def _wait_for_start(self, deadline: float | None) -> None:
        """Wait while the first P1 compiles; EngineUnavailableError or a timeout after that.

        During a restart nobody waits here: the prompt is processed meanwhile.
        """
        if self.supervisor.state == "starting":
            time_left = math.inf if deadline is None else deadline - time.monotonic()
            try:
                async with asyncio.timeout(min(self._max_start_wait_s, time_left)):
                    await self.supervisor.wait_started()
            except TimeoutError:
                if time_left <= self._max_start_wait_s:
                    raise RequestTimeoutError from None
        if self.supervisor.state not in ("ready", "restarting"):
            raise self._unavailable()

    def _unavailable(self) -> EngineUnavailableError:
        """Return the error that says why the engine takes no request."""
        if self.control.weights_error is not None:
            return EngineUnavailableError(self.control.weights_error)
        text = {
            "starting": "the engine is still starting; try again in a few seconds",
            "restarting": "the engine restarts; try again in a few seconds",
            "paused": "the engine process ended again and again, and is started next after a "
            "pause; the server's log says how it ended",
            "dead": "the engine could not be brought back; the server must be restarted",
            "ready": "the engine was lost during this request; try again",
        }[self.supervisor.state]
        return EngineUnavailableError(text, retry_after_s=self.supervisor.retry_after_s)

    def _run_aside(
        self, job: Callable[[], None], done: Callable[[BaseException | None], None]
    ) -> None:
        future = self._loop.run_in_executor(self._table_thread, job)
        future.add_done_callback(lambda f: None if f.cancelled() else done(f.exception()))


@asynccontextmanager
async def _until(deadline: float | None) -> AsyncIterator[None]:
    """Raise RequestTimeoutError at the deadline."""
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
            yield
    except TimeoutError:
        if deadline is None:
            raise
        raise RequestTimeoutError from None
