"""The engine process (P1): messages of the API server (P0) in, steps, messages out.

Only the engine process uses devices. Between two steps a message may change the engine as a whole:
weights, sleep, a pause. Messages about requests are held meanwhile, and taken in their order
afterwards.
"""

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
from tqdm import tqdm

from mmjax.config.engine_config import EngineConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.device.compilation import own_process
from mmjax.engine.device.memory import reserve_memory
from mmjax.engine.device.threads import StepThreads
from mmjax.engine.weights import mark_files
from mmjax.errors import (
    CheckpointError,
    ConfigError,
    InternalError,
    MMJaxError,
    MultiModalCacheMissError,
    RequestError,
    RequestTimeoutError,
    RequestValueError,
)
from mmjax.system.logger import configure_logging, get_logger
from mmjax.system.niceness import give_way
from mmjax.transport.channel import MessagesLostError, Receiver, Sender, step_record_path
from mmjax.transport.codec import Message, Remainder
from mmjax.transport.messages import (
    MESSAGES_LOST_STATUS,
    AbortRequests,
    AdapterLoaded,
    CacheMiss,
    ControlEngine,
    EngineChanged,
    EngineCoreRequest,
    Heartbeat,
    LoadAdapter,
    LoopState,
    Ready,
    RequestFailed,
    RequestOutputDelta,
    Shutdown,
    StepOutput,
    UnloadAdapter,
)
from mmjax.transport.step_record import StepRecord

logger = get_logger(__name__)


class EngineControl:
    """Applies control messages one after the other, each when requests in work allow it."""

    def __init__(
        self,
        core: EngineCore,
        send_outputs: Callable[[list[RequestOutputDelta]], None],
        answer: Callable[[EngineChanged], None],
    ) -> None:
        """Change `core`; tell what steps and aborts gave, and what became of each message."""
        self._core, self._send_outputs, self._answer = core, send_outputs, answer
        self._queue: deque[ControlEngine] = deque()
        self._held: deque[Message | Remainder] = deque()
        self._is_paused = False

    @property
    def is_halted(self) -> bool:
        """Whether no step is computed."""
        return self._is_paused or self._core.is_sleeping or not self._core.has_weights

    @property
    def num_held(self) -> int:
        """Requests that wait for the end of a halt. Thread-safe."""
        return len(self._held)

    def add(self, message: ControlEngine) -> None:
        """Queue a message."""
        self._queue.append(message)

    def hold(self, message: Message | Remainder) -> bool:
        """Keep a message about requests for later, and return True; False: take it now."""
        if isinstance(message, LoadAdapter | UnloadAdapter):
            # Whoever halts the engine may wait for its files to be read, before anything goes on.
            return False
        if not (self._queue or self.is_halted):
            return False
        if isinstance(message, AbortRequests):
            # What nobody waits for is not kept: clients may come and go for as long as it takes.
            self._core.abort(message.request_ids)
            self._drop(set(message.request_ids))
        else:
            self._held.append(message)
        return True

    def _drop(self, request_ids: Collection[str]) -> None:
        """Hold requests no longer, but for the items that P0 counts on P1 to have."""
        held, self._held = self._held, deque()
        for message in held:
            if isinstance(message, EngineCoreRequest) and message.request_id in request_ids:
                self._core.take_items(message)
            else:
                self._held.append(message)

    def apply(self) -> Iterator[Message | Remainder]:
        """Apply what can be applied now; yield the messages that are no longer held."""
        while self._queue and not self._must_wait(self._queue[0]):
            self._apply(self._queue.popleft())
        while self._held and not self._queue and not self.is_halted:
            yield self._held.popleft()

    def _must_wait(self, message: ControlEngine) -> bool:
        is_patient = message.mode == "wait" and message.action in ("sleep", "pause", "load_weights")
        return is_patient and self._core.has_unfinished() and not self.is_halted

    def _apply(self, message: ControlEngine) -> None:
        error, core = None, self._core
        had_weights = core.has_weights
        try:
            self._change(message)
        except RequestError as refusal:
            error = refusal
        except (CheckpointError, ConfigError, OSError) as refusal:
            if message.weights_version is not None:
                # The weights of the start are not served in their place.
                core.lose_weights(message.weights_version)
            elif had_weights and not core.has_weights and not core.is_sleeping:
                # Another process starts, with weights that are whole.
                raise
            error = RequestValueError(str(refusal), param="path")
        if error is not None:
            logger.error("`%s` is refused: %s", message.action, error)
        self._answer(
            EngineChanged(
                number=message.number,
                error=None if error is None else RequestFailed.from_error("", error),
                weights_version=core.weights_version,
                weights_mark=core.weights_mark,
                lacks_weights=not (core.has_weights or core.is_sleeping),
                is_sleeping=core.is_sleeping,
                is_paused=self._is_paused,
            )
        )

    def _change(self, message: ControlEngine) -> None:
        core = self._core
        match message.action:
            case "pause":
                self._settle(message)
                self._is_paused = True
            case "resume":
                self._is_paused = False
            case "sleep":
                self._settle(message)
                core.sleep(message.level)
            case "wake_up":
                core.wake_up()
            case "load_weights":
                if message.path is None:
                    core.load_weights(None, version=message.weights_version)
                    return
                path = Path(message.path)
                if message.weights_mark not in ("", mark_files(path)):
                    raise CheckpointError(
                        f"the files of `{path}` are not those that were loaded as version "
                        f"{message.weights_version}: they are gone, or others were written there"
                    )
                # What is wrong with it ends no request.
                leaves = core.open_weights(path)
                self._settle(message)
                core.load_weights(leaves, version=message.weights_version)

    def _settle(self, message: ControlEngine) -> None:
        """Read the step on the device, and abort what is in work, if that is wanted."""
        if message.mode == "wait" and self._core.has_unfinished():
            raise RequestValueError(
                "requests are held by a pause or by sleep, so that they cannot be finished first; "
                "give another `mode`, or resume before",
                param="mode",
            )
        deltas = self._core.drain()
        if message.mode == "abort":
            deltas += self._core.abort_all()
        self._send_outputs(deltas)


HEARTBEAT_INTERVAL_S = 0.5
_LOADING_INTERVAL_S = 0.01
"""Between looks at adapters that a thread reads."""


def run_engine(config: EngineConfig, address_in: str, address_out: str) -> None:
    """Serve until a `Shutdown` is received.

    Args:
        config: Model, scheduler, caches, devices.
        address_in: Where P0 sends requests; bound by P0.
        address_out: Where P0 waits for outputs; bound by P0.
    """
    configure_logging(config.log_level, process="P1", log_format=config.log_format)
    # Its own lock is a named semaphore, which a process that is killed leaves behind.
    tqdm.set_lock(threading.RLock())
    receiver, sender = Receiver(address_in), Sender(address_out)
    record = StepRecord(step_record_path(address_in))
    try:
        core = _start(config)
        if core.platform == "cpu":
            # It computes on the cores that P0 needs.
            give_way()
        sender.send(
            Ready(
                num_kv_blocks=core.num_kv_blocks,
                block_size=config.cache.block_size,
                num_programs=core.num_programs,
                num_programs_left=core.num_programs_left,
                startup_seconds=core.startup_seconds,
            )
        )
        loop = EngineLoop(core, receiver, sender, record)
        with HeartbeatThread(loop, address_out):
            try:
                loop.run()
            finally:
                # The process ends, and threads that compile with it.
                core.close(wait=False)
    except MessagesLostError as error:
        logger.error("the server's messages cannot be trusted: %s; another process goes on", error)
        raise SystemExit(MESSAGES_LOST_STATUS) from error
    finally:
        record.close()
        receiver.close()
        sender.close(linger_s=1.0)


def _start(config: EngineConfig) -> EngineCore:
    """Return the engine; the process is its own, and so is the share of a GPU."""
    if multiprocessing.parent_process() is not None:  # else a thread of a larger process
        own_process()
    reserve_memory(config.cache.gpu_memory_utilization)
    if config.precompile is None:
        is_alone = config.parallel.num_processes == 1
        config = replace(config, precompile="smallest" if is_alone else "all")
    return EngineCore(config)


def follow_engine(config: EngineConfig) -> None:
    """Make the calls that process 0's engine broadcasts; return when it closes."""
    process_id = config.parallel.process_id
    configure_logging(config.log_level, process=f"P1.{process_id}", log_format=config.log_format)
    core = _start(config)
    logger.info("process %d of %d follows", process_id, config.parallel.num_processes)
    core.follow()


def run_follower(config: EngineConfig, address_in: str, address_out: str) -> None:
    """Follow, as a process that is spawned as P1 is; it has no messages."""
    try:
        follow_engine(config)
    except MMJaxError as error:
        # Nobody else tells of it: P0 may be on another host.
        logger.error("the engine cannot start: %s", error)
        raise


class EngineLoop:
    """Receive, step, reply, until a `Shutdown`."""

    def __init__(
        self, core: EngineCore, receiver: Receiver, sender: Sender, record: StepRecord
    ) -> None:
        """Serve `core`; `record` tells P0 after a crash what was computed."""
        self._receiver = receiver
        self._sender = sender
        self._record = record
        self.core = core
        self._control = EngineControl(core, self._tell, sender.send)
        core.note_computing = record.write
        self.num_turns = 0
        """Turns so far."""

    def run(self) -> None:
        """Serve; return on `Shutdown`."""
        while self._receive_all():
            for message in self._control.apply():
                self._take(message)
            self._expire()
            # A step without work is for processes that follow.
            if not self._control.is_halted or not self.core.has_unfinished():
                self._step()
            self.num_turns += 1

    @property
    def state(self) -> LoopState:
        """What the loop has done so far. Thread-safe."""
        return LoopState(
            num_turns=self.num_turns,
            num_received=self._receiver.num_received,
            num_sent=self._sender.num_sent,
        )

    def stats(self) -> Heartbeat:
        """Return the core's statistics, and with them what is held. Thread-safe."""
        stats, num_held = self.core.stats(), self._control.num_held
        return msgspec.structs.replace(stats, num_waiting=stats.num_waiting + num_held)

    def _receive_all(self) -> bool:
        """Handle queued messages, waiting only if no request is unfinished; False on `Shutdown`."""
        is_working = self.core.has_unfinished() and not self._control.is_halted
        wait_s = 0.0 if is_working else HEARTBEAT_INTERVAL_S
        if self.core.is_loading or self.core.is_warming:
            wait_s = min(wait_s, _LOADING_INTERVAL_S)
        message = self._receiver.receive(wait_s)
        while message is not None:
            if isinstance(message, Shutdown):
                return False
            if isinstance(message, ControlEngine):
                self._control.add(message)
            elif not self._control.hold(message):
                self._take(message)
            message = self._receiver.receive(0.0)
        return True

    def _take(self, message: Message | Remainder) -> None:
        if isinstance(message, Remainder):
            for request_id in message.request_ids:
                self._fail(request_id, InternalError("the request could not be read"))
        elif isinstance(message, AbortRequests):
            self.core.abort(message.request_ids)
        elif isinstance(message, EngineCoreRequest):
            computing = self._record.request_ids
            self._record.write((*computing, message.request_id))
            try:
                self.core.add_request(message)
            except MultiModalCacheMissError as miss:
                logger.info("request %s: %s; asked for again", message.request_id, miss)
                self._sender.send(
                    CacheMiss(request_id=message.request_id, mm_hashes=miss.mm_hashes)
                )
            except RequestError as error:
                self._fail(message.request_id, error)
            except Exception:
                # An internal error of one request must not end the others.
                logger.exception("request %s could not be taken in", message.request_id)
                self.core.abort([message.request_id])
                self._fail(message.request_id, InternalError("internal error"))
            finally:
                self._record.write(computing)
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            self._change_adapters(message)
        else:
            logger.error("dropped a %s: not a message to P1", type(message).__name__)

    def _change_adapters(self, message: LoadAdapter | UnloadAdapter) -> None:
        try:
            if isinstance(message, LoadAdapter):
                self.core.load_adapter(message.lora_name, Path(message.lora_path))
            else:
                self.core.unload_adapter(message.lora_name)
        except RequestError as error:
            if isinstance(message, LoadAdapter):
                self._tell_loaded(message.lora_name, error)

    def _tell_loaded(self, lora_name: str, error: RequestError | None) -> None:
        failure = None if error is None else RequestFailed.from_error(lora_name, error)
        self._sender.send(AdapterLoaded(lora_name=lora_name, error=failure))

    def _expire(self) -> None:
        for lora_name, failure in self.core.pop_loaded():
            self._tell_loaded(lora_name, failure)
        for request_id in self.core.expire():
            self._fail(request_id, RequestTimeoutError())
        for request_id, error in self.core.pop_failed():
            self._fail(request_id, error)

    def _step(self) -> None:
        try:
            deltas = self.core.step()
        except Exception:
            logger.exception("a step failed; its requests are computed again, one by one")
            for request_id in self.core.recover():
                logger.error("request %s ends: its step failed alone", request_id)
                self._fail(request_id, InternalError("internal error in the engine"))
            return
        self._tell(deltas)

    def _tell(self, deltas: list[RequestOutputDelta]) -> None:
        if deltas:
            self._sender.send(StepOutput(deltas=deltas))

    def _fail(self, request_id: str, error: RequestError) -> None:
        self._sender.send(RequestFailed.from_error(request_id, error))


class HeartbeatThread:
    """Sends heartbeats from a thread: one step of a large model may take a minute.

    A beat that came late, since the process was stopped, counts as two intervals of a turn's age.
    """

    def __init__(self, loop: EngineLoop, address_out: str) -> None:
        """Tell of `loop`, which the calling thread is about to run."""
        self._loop = loop
        self._address_out = address_out
        self._is_over = threading.Event()
        self._turn = 0
        self._turn_s = self._idle_s = 0.0
        self._step_threads = StepThreads(loop.core.device_threads)
        self._last_beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "HeartbeatThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        # ZMQ sockets are not thread-safe: this is a second one to the same address.
        sender = Sender(self._address_out)
        try:
            while not self._is_over.is_set():
                self._send_stats(sender)
                self._is_over.wait(HEARTBEAT_INTERVAL_S)
        finally:
            sender.close()

    def _send_stats(self, sender: Sender) -> None:
        try:
            beat = msgspec.structs.replace(self._loop.stats(), loop=self._see_loop())
        except Exception:
            # Without heartbeats P0 would restart P1.
            logger.exception("the engine has no statistics")
            beat = Heartbeat(num_running=0, num_waiting=0, kv_cache_usage=0.0, num_compilations=0)
            beat = msgspec.structs.replace(beat, loop=self._loop.state)
        sender.send(beat)

    def _see_loop(self) -> LoopState:
        """Return the loop's state with the age of its turn."""
        state, now = self._loop.state, time.monotonic()
        elapsed, self._last_beat = now - self._last_beat, now
        if state.num_turns != self._turn:
            self._turn, self._turn_s, self._idle_s = state.num_turns, 0.0, 0.0
            return state
        elapsed = min(elapsed, 2 * HEARTBEAT_INTERVAL_S)
        self._turn_s += elapsed
        self._idle_s = 0.0 if self._step_threads.look() else self._idle_s + elapsed
        return msgspec.structs.replace(state, turn_s=self._turn_s, idle_s=self._idle_s)
