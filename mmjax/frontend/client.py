"""The engine as an event loop sees it: add a request, read its outputs, abort it."""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from mmjax.config import SchedulerConfig
from mmjax.errors import CapacityError, EngineUnavailableError, RequestError
from mmjax.frontend.input_processor import InputProcessor, ProcessedRequest, PromptType
from mmjax.frontend.output_processor import OutputProcessor
from mmjax.frontend.outputs import RequestOutput
from mmjax.frontend.supervisor import EngineLink
from mmjax.logger import get_logger
from mmjax.sampling_params import SamplingParams
from mmjax.transport.messages import AbortRequests, EngineMessage, RequestFailed, StepOutput

logger = get_logger(__name__)

PromptSource = PromptType | Callable[[], PromptType]
"""A prompt, or what makes it (decodes its images): that runs outside of the event loop."""

_MAX_REPLAYS = 1
"""Lives of P1 that one request may see end: the next one may be its doing."""


class RequestStream:
    """The outputs of one request; iterate it, and close it when nobody listens any more."""

    def __init__(self, client: "AsyncEngineClient", request: ProcessedRequest) -> None:
        self.request = request
        self.num_replays = 0
        self._client = client
        self._queue: asyncio.Queue[RequestOutput | RequestError] = asyncio.Queue()
        self._is_done = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_done and self._queue.empty():
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, RequestError):
            raise item
        return item

    def put(self, item: RequestOutput | RequestError) -> None:
        """Add what the reader gets next."""
        self._is_done = isinstance(item, RequestError) or item.finished
        self._queue.put_nowait(item)

    def close(self) -> None:
        """Abort the request unless it has finished."""
        if not self._is_done:
            self._is_done = True
            self._client.abort(self.request.request_id)


class AsyncEngineClient:
    """P0's side of the engine."""

    def __init__(
        self,
        input_processor: InputProcessor,
        supervisor: EngineLink,
        scheduler: SchedulerConfig,
        *,
        num_workers: int = 2,
        max_start_wait_s: float = 300.0,
    ) -> None:
        """Serve through `supervisor`; requests that come during the start wait for its end."""
        self.input_processor = input_processor
        self.supervisor = supervisor
        # A copy: the event loop decodes while threads encode, and one tokenizer cannot do both.
        self._output_processor = OutputProcessor(copy.deepcopy(input_processor.tokenizer))
        self._capacity = scheduler.max_num_seqs + scheduler.max_num_queued_reqs
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="mmjax-process")
        self._streams: dict[str, RequestStream] = {}
        self._num_processing = 0
        self._max_start_wait_s = max_start_wait_s
        self._outbox: asyncio.Queue[EngineMessage] = asyncio.Queue()
        self._mailer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to talk to P1; returns before it is ready."""
        self._mailer = asyncio.create_task(self._send_mail(), name="send-mail")
        await self.supervisor.start(self)

    async def close(self) -> None:
        """End P1 and the threads."""
        if self._mailer is not None:
            self._mailer.cancel()
            await asyncio.gather(self._mailer, return_exceptions=True)
        await self.supervisor.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def num_requests(self) -> int:
        """Requests that are processed, wait or run."""
        return len(self._streams) + self._num_processing

    async def add_request(
        self,
        request_id: str,
        prompt: PromptSource,
        sampling_params: SamplingParams,
        *,
        stream: bool = False,
        continues_prompt: bool = True,
    ) -> RequestStream:
        """Admit and process a request; raises RequestError before anything is streamed."""
        self._admit(sampling_params.n)
        self._num_processing += 1
        try:
            await self._wait_for_start()
            loop = asyncio.get_running_loop()
            request = await loop.run_in_executor(
                self._pool, self._process, request_id, prompt, sampling_params, continues_prompt
            )
        finally:
            self._num_processing -= 1
        self._check_ready()
        handle = RequestStream(self, request)
        self._streams[request_id] = handle
        self._output_processor.add_request(request, stream=stream)
        self._send_request(request)
        return handle

    async def generate(
        self,
        request_id: str,
        prompt: PromptSource,
        sampling_params: SamplingParams,
        *,
        stream: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request; leaving the loop early aborts it."""
        handle = await self.add_request(request_id, prompt, sampling_params, stream=stream)
        try:
            async for output in handle:
                yield output
        finally:
            handle.close()

    def abort(self, request_id: str) -> None:
        """Forget a request, here and in P1."""
        self._streams.pop(request_id, None)
        running = self._output_processor.abort([request_id])
        if running:
            self._outbox.put_nowait(AbortRequests(request_ids=running))

    # ---- EngineListener -------------------------------------------------------------------------

    def on_message(self, message: StepOutput | RequestFailed) -> None:
        """Hand a step's outputs to their readers."""
        if isinstance(message, RequestFailed):
            self._fail_sequence(message)
            return
        to_abort: list[str] = []
        for delta in message.deltas:
            try:
                # One by one: what goes wrong with one request's text is that request's alone.
                outputs, ended = self._output_processor.process([delta])
            except Exception:
                logger.exception("outputs of request %s could not be read", delta.request_id)
                failure = RequestFailed(request_id=delta.request_id, message="", status=500)
                self._fail_sequence(failure)
                to_abort.append(delta.request_id)
                continue
            to_abort += ended
            for output in outputs:
                self._deliver(output)
        if to_abort:
            self._outbox.put_nowait(AbortRequests(request_ids=to_abort))

    def on_death(self) -> None:
        """Answer what cannot go on; what has shown nothing yet waits for the next P1."""
        # Mail that P1 never read is not for its successor: what it held is sent again on_ready.
        while not self._outbox.empty():
            self._outbox.get_nowait()
        can_wait = self.supervisor.state == "restarting"
        for request_id, handle in list(self._streams.items()):
            has_output = self._output_processor.has_output(request_id)
            if can_wait and not has_output and handle.num_replays < _MAX_REPLAYS:
                continue
            self._output_processor.abort([request_id])
            del self._streams[request_id]
            handle.put(_unavailable(self.supervisor))

    def on_ready(self) -> None:
        """Send again what the last P1 took with it.

        NOTE: only requests without output are replayed, so no token is said twice. Replaying
        prompt and output together belongs here, too.
        """
        if self.supervisor.num_restarts == 0:
            return
        for handle in self._streams.values():
            handle.num_replays += 1
            self._send_request(handle.request)

    # ---- parts ----------------------------------------------------------------------------------

    def _process(
        self,
        request_id: str,
        prompt: PromptSource,
        sampling_params: SamplingParams,
        continues_prompt: bool,
    ) -> ProcessedRequest:
        return self.input_processor.process(
            request_id,
            prompt() if callable(prompt) else prompt,
            sampling_params,
            continues_prompt=continues_prompt,
        )

    async def _wait_for_start(self) -> None:
        """Hold a request while the first P1 compiles, rather than send an early client away."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._max_start_wait_s
        while self.supervisor.state == "starting" and clock() < deadline:
            await asyncio.sleep(0.05)
        self._check_ready()

    def _check_ready(self) -> None:
        if self.supervisor.state != "ready":
            raise _unavailable(self.supervisor)

    def _admit(self, num_sequences: int) -> None:
        # Before any decoding: refusing must stay cheap when there is most to refuse.
        if self.num_requests + num_sequences > self._capacity:
            raise CapacityError(
                f"the server holds {self.num_requests} requests and takes {self._capacity}; "
                "try again in a moment"
            )

    def _send_request(self, request: ProcessedRequest) -> None:
        for message in request.messages:
            self._outbox.put_nowait(message)

    async def _send_mail(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self.supervisor.send(message)
            except Exception:
                logger.exception("a message could not be sent to P1")

    def _deliver(self, output: RequestOutput) -> None:
        handle = self._streams.get(output.request_id)
        if handle is None:
            return
        handle.put(output)
        if output.finished:
            del self._streams[output.request_id]

    def _fail_sequence(self, failure: RequestFailed) -> None:
        failed = self._output_processor.fail(failure.request_id)
        if failed is None:
            return
        request_id, others = failed
        if others:
            self._outbox.put_nowait(AbortRequests(request_ids=others))
        handle = self._streams.pop(request_id, None)
        if handle is not None:
            handle.put(_error_of(failure))


def _error_of(failure: RequestFailed) -> RequestError:
    is_internal = failure.status >= 500 and failure.status != EngineUnavailableError.status
    # What went wrong inside is for the log, not for the client.
    text = "the engine failed on this request; the log says why" if is_internal else failure.message
    error = RequestError(text, param=failure.param)
    error.status = failure.status
    return error


def _unavailable(supervisor: EngineLink) -> EngineUnavailableError:
    text = {
        "starting": "the engine is still starting; try again in a few seconds",
        "restarting": "the engine restarts; try again in a few seconds",
        "dead": "the engine could not be brought back; the server must be restarted",
        "ready": "the engine was lost during this request; try again",
    }
    return EngineUnavailableError(text[supervisor.state])
