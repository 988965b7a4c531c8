"""The asyncio client of the engine: add requests, read their outputs, abort them."""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import cache, partial
from pathlib import Path
from typing import TypeVar, cast

from mmjax.config.engine_config import LoRAConfig, SchedulerConfig, SchedulingPolicy
from mmjax.errors import (
    InternalError,
    RequestError,
    RequestQuarantinedError,
    RequestTimeoutError,
)
from mmjax.frontend.engine_client.adapters import AdapterClient
from mmjax.frontend.engine_client.capacity import Capacity
from mmjax.frontend.engine_client.committer import CommittedMessage
from mmjax.frontend.engine_client.observer import EndReason, RequestObserver, notify
from mmjax.frontend.engine_client.quarantine import Quarantine
from mmjax.frontend.engine_client.request_stream import PendingRequest, RequestStream
from mmjax.frontend.engine_client.requests import ProcessedRequest
from mmjax.frontend.engine_client.resend_queue import ResendQueue, call_in_loop
from mmjax.frontend.engine_client.stats_log import StatsLog
from mmjax.frontend.engine_client.supervisor import EngineLink
from mmjax.frontend.engine_client.suspects import EngineExit
from mmjax.frontend.engine_client.waits import unavailable, until, wait_for_start
from mmjax.frontend.output.output_processor import OutputProcessor, ProcessedOutputs
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.prompt.explain import Explanation
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.prompt.prompts import PromptType
from mmjax.frontend.prompt.work_lanes import WorkLanes
from mmjax.processing.media.decode_budget import Cancellation, DecodeControl
from mmjax.requests.request_times import RequestTimes, measuring, recording
from mmjax.requests.sampling_params import SamplingParams
from mmjax.system.logger import get_logger
from mmjax.transport.messages import (
    AbortRequests,
    AdapterLoaded,
    CacheMiss,
    RequestFailed,
    StepOutput,
)

logger = get_logger(__name__)

T = TypeVar("T")

PromptSource = PromptType | Callable[[], PromptType]
"""A prompt, or a function that makes it (decodes its images) outside of the event loop."""

_EXPIRY_GRACE_S = 1.0
"""Seconds after its deadline in which P1, which expires requests between steps, may still do so."""


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
        # A copy: the event loop decodes while threads encode, and a tokenizer is not thread-safe.
        self._output_processor = OutputProcessor(copy.deepcopy(input_processor.tokenizer))
        self.scheduling_policy: SchedulingPolicy = scheduler.scheduling_policy
        self.capacity = Capacity(scheduler.max_num_unfinished_seqs, scheduler.max_num_queued_tokens)
        self._lanes = WorkLanes(num_workers)
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="mmjax-grammar")
        self._streams: dict[str, RequestStream] = {}
        self._observers: list[RequestObserver] = []
        self._max_start_wait_s = max_start_wait_s
        self._stats_log = _stats_log(supervisor, input_processor)
        self._resend_queue = ResendQueue(
            input_processor.committer,
            send=supervisor.send,
            fail=self._fail_with_error,
            get_output=self._output_processor.get_output_token_ids,
        )
        self._quarantine = Quarantine(quarantine_s)
        modules = {} if lora is None else dict(lora.modules)
        self.adapters = AdapterClient(modules, put=self._resend_queue.put)

    def observe(self, observer: RequestObserver) -> None:
        """Tell `observer` about all requests from now on."""
        self._observers.append(observer)

    async def start(self) -> None:
        """Connect to P1, without waiting until it is ready."""
        self._resend_queue.start()
        await self.supervisor.start(self)
        self._stats_log.start()

    async def close(self) -> None:
        """End P1 and the threads."""
        await self._stats_log.close()
        await self._resend_queue.stop()
        await self.supervisor.close()
        self._lanes.close()
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)
        self._resend_queue.close()
        # In a thread: another one may still hold the caches' locks.
        await asyncio.to_thread(self.input_processor.close)

    @property
    def num_requests(self) -> int:
        """Requests that are being processed, wait or run."""
        return len(self._streams) + self.capacity.num_requests

    @property
    def num_seqs(self) -> int:
        """Sequences of those requests: `n` of each."""
        handles = self._streams.values()
        return self.capacity.num_seqs + sum(len(one.request.messages) for one in handles)

    async def add_request(
        self,
        request_id: str,
        prompt: PromptSource,
        sampling_params: SamplingParams,
        *,
        stream: bool = False,
        continues_prompt: bool = True,
        id_domain: str | None = None,
        lora_name: str | None = None,
        priority: int = 0,
        timeout_s: float = 0.0,
        generated_token_ids: Sequence[Sequence[int]] = (),
    ) -> RequestStream:
        """Admit and process a request; raises RequestError before anything is streamed.

        Args:
            request_id: Unique among unfinished requests.
            prompt: The prompt, or a function that makes it.
            sampling_params: With `n` sequences.
            stream: Whether outputs hold what each step adds, rather than all so far.
            continues_prompt: Whether the output continues the prompt's text.
            id_domain: The namespace of the prompt's media ids; None: the global one.
            lora_name: The adapter, or None.
            priority: Lower ones first.
            timeout_s: Seconds after which it ends with RequestTimeoutError; 0: never.
            generated_token_ids: For each sequence, what an engine elsewhere has generated: it goes
                on after them, and a stream tells of them first.
        """
        deadline = time.monotonic() + timeout_s if timeout_s else None
        self._admit(sampling_params.n)
        pending = PendingRequest(is_stream=stream, num_seqs=sampling_params.n)
        prepare = partial(
            self.input_processor.prepare,
            request_id,
            sampling_params=sampling_params,
            continues_prompt=continues_prompt,
            id_domain=id_domain,
            lora_name=lora_name,
            priority=priority,
            deadline=deadline,
            generated_token_ids=generated_token_ids,
        )
        try:
            await wait_for_start(self.supervisor, self._max_start_wait_s, deadline)
            loop = asyncio.get_running_loop()
            if (structure := sampling_params.structured_outputs) is not None:
                # In a thread of its own, so that a slow one delays no request without; `prepare`
                # finds it read.
                read = self.input_processor.grammars.read
                await loop.run_in_executor(self._grammar_thread, read, structure)
            job = partial(self._process, pending, prepare, loop)
            await self._run(job, prompt, pending.cancellation, pending.times, deadline)
        except BaseException:
            pending.cancellation.set()
            if pending.handle is not None:
                self.abort(request_id)
            raise
        finally:
            if pending.handle is None:
                self.capacity.leave(sampling_params.n)
            if pending.reservation is not None:
                pending.reservation.release()
        if pending.handle is None:
            raise unavailable(self.supervisor)
        return pending.handle

    async def load_adapter(self, lora_name: str, path: Path) -> None:
        """Load an adapter from a directory, which requests may name then; RequestError."""
        await wait_for_start(self.supervisor, self._max_start_wait_s, None)
        await self.adapters.load(lora_name, path)

    async def explain(
        self, prompt: PromptSource, *, id_domain: str | None = None, is_bounded: bool = True
    ) -> Explanation:
        """Process a prompt, and describe the result; counts as a request meanwhile.

        Without `is_bounded`, the prompt may be too long for the model.
        """
        explain = partial(self.input_processor.explain, id_domain=id_domain, is_bounded=is_bounded)
        return await self._work(prompt, lambda made, control: explain(made, control=control))

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return a text's token ids; counts as a request meanwhile."""
        tokenize = self.input_processor.tokenize
        return await self._work(
            text, lambda *_: tokenize(text, add_special_tokens=add_special_tokens)
        )

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of token ids; counts as a request meanwhile."""
        return await self._work("", lambda *_: self.input_processor.detokenize(token_ids))

    async def _work(self, prompt: PromptSource, job: Callable[[PromptType, DecodeControl], T]) -> T:
        """Run a job on a prompt in a thread for requests."""
        self._admit(1)
        cancellation = Cancellation()
        try:
            return await self._run(
                job, prompt, cancellation, RequestTimes(arrived_at=time.monotonic())
            )
        finally:
            cancellation.set()
            self.capacity.leave(1)

    async def generate(
        self,
        request_id: str,
        prompt: PromptSource,
        sampling_params: SamplingParams,
        *,
        stream: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request; closing the iterator aborts it."""
        handle = await self.add_request(request_id, prompt, sampling_params, stream=stream)
        try:
            async for output in handle:
                yield output
        finally:
            handle.close()

    def abort(self, request_id: str) -> None:
        """Abort a request, here and in P1."""
        handle = self._drop(request_id)
        if handle is not None:
            self._notify_broken_off(handle, "abort")
        running = self._output_processor.abort([request_id])
        if running:
            self._resend_queue.put(AbortRequests(request_ids=running))

    # ---- EngineListener -------------------------------------------------------------------------

    def on_message(self, message: StepOutput | RequestFailed | CacheMiss | AdapterLoaded) -> None:
        """Put a step's outputs into their streams."""
        match message:
            case AdapterLoaded():
                self.adapters.on_loaded(message)
            case RequestFailed():
                self._fail_sequence(message.request_id, _error_of(message))
            case CacheMiss():
                self._resend_queue.on_miss(message)
            case StepOutput():
                self._take_outputs(message)

    def _take_outputs(self, message: StepOutput) -> None:
        to_abort: list[str] = []
        for delta in message.deltas:
            self._resend_queue.acknowledge(delta.request_id)
            try:
                # One by one, so that an error in one request's text ends that request alone.
                processed = self._output_processor.process([delta])
            except Exception:
                logger.exception("outputs of request %s could not be read", delta.request_id)
                self._fail_sequence(delta.request_id, _internal_error())
                to_abort.append(delta.request_id)
                continue
            to_abort += processed.request_ids_to_abort
            self._pass_on(processed)
        if to_abort:
            self._resend_queue.put(AbortRequests(request_ids=to_abort))

    def on_exit(self, engine_exit: EngineExit) -> None:
        """Let all requests wait for the next P1, but for one that has ended this one.

        If there will be none, or not soon, all fail.
        """
        culprit = self._resend_queue.on_exit(engine_exit)
        self.adapters.on_exit()
        if culprit is not None:
            logger.error("request %s ended the engine process; it fails", culprit.request_id)
            self._quarantine.add(culprit)
            self._fail_request(culprit.request_id, RequestQuarantinedError())
        if self.supervisor.state != "restarting":
            for request_id in list(self._streams):
                self._fail_request(request_id, unavailable(self.supervisor))

    def on_ready(self) -> None:
        """Send all unfinished requests again, with what was generated for them."""
        # Before the requests that name them.
        self.adapters.on_ready()
        self._resend_queue.on_ready()

    # ---- parts ----------------------------------------------------------------------------------

    async def _run(
        self,
        job: Callable[[PromptType, DecodeControl], T],
        prompt: PromptSource,
        cancellation: Cancellation,
        times: RequestTimes,
        deadline: float | None = None,
    ) -> T:
        """Make the prompt and run `job` on it, in a thread; fetch its media in between."""
        connector, make_prompt = self.input_processor.connector, _make_once(prompt)

        def run_if_whole(control: DecodeControl) -> tuple[PromptType, T | None]:
            times.wait_until(time.monotonic())
            with recording(times):
                made = make_prompt()
            return made, job(made, control) if connector.is_whole(made) else None

        def run(control: DecodeControl) -> T:
            times.wait_until(time.monotonic())
            return job(whole, control)

        made, result = await self._lanes.run(run_if_whole, cancellation)
        if connector.is_whole(made):
            return cast(T, result)
        async with until(deadline), AsyncExitStack() as stack:
            with recording(times), measuring("fetch"):
                whole = await stack.enter_async_context(connector.fetched(made))
            return await self._lanes.run(run, cancellation)

    def _process(
        self,
        pending: PendingRequest,
        prepare: Callable[..., ProcessedRequest],
        loop: asyncio.AbstractEventLoop,
        prompt: PromptType,
        control: DecodeControl,
    ) -> None:
        """Process a prompt, in a thread; pass its messages to the loop as they are committed."""
        with recording(pending.times):
            request = prepare(prompt=prompt, control=control)
            self._quarantine.check(request)
            pending.reservation = self.capacity.reserve_tokens(
                len(request.prompt_token_ids) * len(request.messages),
                lambda: self._output_processor.num_queued_tokens,
            )
            if pending.is_cancelled:
                # Nobody waits any more who would release it.
                pending.reservation.release()
            else:
                self.input_processor.committer.commit(
                    request, partial(call_in_loop, loop, self._on_committed, pending)
                )

    def _on_committed(self, pending: PendingRequest, committed: CommittedMessage) -> None:
        """Queue a message from a thread; the first one registers the request.

        No later one: without its first sequence a request would never end.
        """
        can_serve = self.supervisor.state not in ("paused", "dead")
        if committed.index == 0 and not pending.is_cancelled and can_serve:
            pending.handle = self._register(committed.request, is_stream=pending.is_stream)
            self.capacity.leave(pending.num_seqs)
        self._resend_queue.put_committed(committed)

    def _register(self, request: ProcessedRequest, *, is_stream: bool) -> RequestStream:
        handle = self._streams[request.request_id] = RequestStream(self.abort, request)
        brought = self._output_processor.add_request(request, stream=is_stream)
        self._resend_queue.add(request)
        for observer in self._observers:
            notify(partial(observer.on_added, request))
        deadline = request.messages[0].deadline
        if deadline is not None:
            handle.expiry = asyncio.get_running_loop().call_later(
                deadline - time.monotonic() + _EXPIRY_GRACE_S, self._expire, request.request_id
            )
        self._pass_on(brought)
        return handle

    def _expire(self, request_id: str) -> None:
        running = self._output_processor.abort([request_id])
        self._resend_queue.put(AbortRequests(request_ids=running))
        self._fail_request(request_id, RequestTimeoutError())

    def _drop(self, request_id: str) -> RequestStream | None:
        """Forget a request, finished or not; return its stream."""
        handle = self._streams.pop(request_id, None)
        if handle is not None:
            self._resend_queue.discard(handle.request)
            if handle.expiry is not None:
                handle.expiry.cancel()
        return handle

    def check_room(self) -> None:
        """Raise CapacityError if there is no room for one more sequence."""
        self.capacity.check_room(1, num_others=self.num_seqs - self.capacity.num_seqs)

    def _admit(self, num_seqs: int) -> None:
        # Before any decoding, so that refusing is cheap under overload.
        self.capacity.enter(num_seqs, num_others=self.num_seqs - self.capacity.num_seqs)

    def _put_output(self, output: RequestOutput) -> None:
        handle = self._streams.get(output.request_id)
        if handle is None:
            return
        handle.put(output)
        if output.finished:
            self._drop(output.request_id)

    def _fail_with_error(self, sequence_id: str, error: Exception) -> None:
        is_known = isinstance(error, RequestError)
        self._fail_sequence(sequence_id, error if is_known else _internal_error())

    def _fail_sequence(self, sequence_id: str, error: RequestError) -> None:
        failed = self._output_processor.fail(sequence_id)
        if failed is None:
            return
        request_id, others = failed
        if others:
            self._resend_queue.put(AbortRequests(request_ids=others))
        self._fail_request(request_id, error)

    def _fail_request(self, request_id: str, error: RequestError) -> None:
        self._output_processor.abort([request_id])
        handle = self._drop(request_id)
        if handle is not None:
            self._notify_broken_off(handle, "error")
            handle.put(error)

    def _pass_on(self, processed: ProcessedOutputs) -> None:
        """Tell observers and streams of outputs; stop tracking what they finish."""
        for sequence in processed.finished:
            self._resend_queue.finish(sequence.request_id)
        self._notify_of(processed)
        for output in processed.request_outputs:
            self._put_output(output)

    def _notify_of(self, processed: ProcessedOutputs) -> None:
        for tokens in processed.new_tokens:
            for observer in self._observers:
                self._notify(tokens.request, partial(observer.on_tokens, tokens))
        for sequence in processed.finished:
            for observer in self._observers:
                self._notify(sequence.request, partial(observer.on_finished, sequence))

    def _notify(self, request: ProcessedRequest, callback: Callable[[], None]) -> None:
        handle = self._streams.get(request.request_id)
        if handle is not None:
            handle.context.run(notify, callback)

    def _notify_broken_off(self, handle: RequestStream, reason: EndReason) -> None:
        for observer in self._observers:
            handle.context.run(notify, partial(observer.on_broken_off, handle.request, reason))


def _stats_log(supervisor: EngineLink, input_processor: InputProcessor) -> StatsLog:
    cache = input_processor.cache
    return StatsLog(lambda: supervisor.heartbeat, None if cache is None else cache.make_stats)


def _internal_error() -> RequestError:
    # Details are for the log, not for the client.
    return InternalError("the engine failed on this request; the log says why")


def _make_once(prompt: PromptSource) -> Callable[[], PromptType]:
    """Return a function that makes the prompt at its first call, and caches it."""
    return cache(prompt) if callable(prompt) else lambda: prompt


def _error_of(failure: RequestFailed) -> RequestError:
    error = failure.to_error()
    return _internal_error() if isinstance(error, InternalError) else error
