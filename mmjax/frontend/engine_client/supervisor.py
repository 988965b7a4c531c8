"""Starts P1, monitors it, and replaces it when it dies or hangs.

Knows nothing of requests: a listener is called when P1 ends and when it is ready.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol, runtime_checkable

from mmjax.config.engine_config import EngineConfig
from mmjax.errors import MMJaxError
from mmjax.frontend.engine_client.engine_process import EngineProcess, SpawnOptions, describe_exit
from mmjax.frontend.engine_client.liveness import (
    FIRST_PAUSE_S,
    EngineWatch,
    Fault,
    RestartBreaker,
)
from mmjax.frontend.engine_client.suspects import EngineExit, ExitCause
from mmjax.system.logger import LogFormat, LogLevel, get_logger
from mmjax.transport.channel import MessagesLostError
from mmjax.transport.codec import Remainder
from mmjax.transport.messages import (
    MESSAGES_LOST_STATUS,
    AbortRequests,
    EngineEvent,
    EngineMessage,
    Heartbeat,
    Ready,
    RequestFailed,
    Shutdown,
    StepOutput,
)

logger = get_logger(__name__)

ENGINE_MAIN = "mmjax.engine.process:run_engine"
"""P1's main; by name, since importing it would load jax in P0."""

EngineState = Literal["starting", "ready", "restarting", "paused", "dead"]
"""`paused`: P1 ended too often, and is started again after a while; `dead`: never."""

_SIGNALS_FROM_OUTSIDE = {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM}


class EngineStartError(MMJaxError):
    """P1 ended before it was ready."""


@runtime_checkable
class EngineListener(Protocol):
    """The callbacks of a supervisor: P1's messages, ends and starts."""

    def on_message(self, message: EngineEvent) -> None:
        """Handle a message of P1."""

    def on_exit(self, engine_exit: EngineExit) -> None:
        """Handle the end of P1, with all its state."""

    def on_ready(self) -> None:
        """Handle that P1 accepts requests."""


@runtime_checkable
class EngineLink(Protocol):
    """The client's interface to the owner of an engine, such as `Supervisor`."""

    state: EngineState
    ready: Ready | None
    heartbeat: Heartbeat | None
    num_restarts: int

    @property
    def is_healthy(self) -> bool:
        """Whether the engine is ready and sends heartbeats."""
        ...

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until the engine is started next, while it is paused."""
        ...

    async def start(self, listener: EngineListener) -> None:
        """Start to relay the engine's messages."""

    async def wait_started(self) -> None:
        """Wait until `state` is no longer "starting"."""

    def send(self, message: EngineMessage) -> None:
        """Send to the engine, in the order of the calls; a message to a dead one is lost."""

    async def close(self) -> None:
        """End the engine."""


class Supervisor:
    """Owns P1, which is spawned on construction, so that it loads before the event loop runs."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        main: str = ENGINE_MAIN,
        hang_timeout_s: float = 7.0,
        shutdown_timeout_s: float = 5.0,
        has_standby: bool = False,
        log_level: LogLevel = "info",
        log_format: LogFormat = "text",
    ) -> None:
        """Without `config` P1 imports what it needs, and waits for `configure`.

        Args:
            config: The engine's.
            main: P1's main, as `module:function`.
            hang_timeout_s: Silence of P1, or a step in which it waits, that counts as a hang.
            shutdown_timeout_s: Seconds that P1 has to end.
            has_standby: Whether the next P1 is spawned as soon as the present one is ready.
            log_level: P1's.
            log_format: P1's.
        """
        self.state: EngineState = "starting"
        self.ready: Ready | None = None
        self.heartbeat: Heartbeat | None = None
        self.num_restarts = 0
        self._config = config
        self._options = SpawnOptions(main=main, log_level=log_level, log_format=log_format)
        self._hang_timeout_s = hang_timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._has_standby = has_standby
        self._standby: EngineProcess | None = None
        self._breaker = RestartBreaker()
        self._retry_at: float | None = None
        self._listener: EngineListener | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_changed = asyncio.Event()
        """Set at the next change of `state` or `ready`, and then replaced."""
        self._was_ready = False
        self._num_received = 0
        """Messages of the present P1, without heartbeats."""
        self._fault: Fault | None = None
        """Why the present P1 was killed."""
        self._start_error = "the engine process ended before it was ready; see its log"
        self._engine = EngineProcess.spawn(self._options)
        self._watch = self._make_watch()
        if config is not None:
            self._engine.configure(config)

    def configure(self, config: EngineConfig) -> None:
        """Let P1 start, and every P1 after it."""
        self._config = config
        self._engine.configure(config)

    @property
    def pid(self) -> int | None:
        """Process id of P1; None if there is none."""
        return self._engine.process.pid

    @property
    def is_healthy(self) -> bool:
        """Whether P1 is ready and sends heartbeats."""
        return self.state == "ready" and not self._watch.silence.is_expired

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until P1 is started next, while that is paused."""
        return None if self._retry_at is None else max(0.0, self._retry_at - time.monotonic())

    async def start(self, listener: EngineListener) -> None:
        """Open the sockets and monitor P1, in the running event loop."""
        self._listener = listener
        self._task = asyncio.create_task(self._supervise(), name="supervise")

    async def wait_started(self) -> None:
        """Wait until the first P1 is ready, or has ended for good."""
        await self._wait_until(lambda: self.state != "starting")

    async def wait_ready(self) -> Ready:
        """Wait until P1 is ready; EngineStartError if its start failed."""
        await self._wait_until(lambda: self.ready is not None or self.state == "dead")
        if self.ready is None:
            raise EngineStartError(self._start_error)
        return self.ready

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._has_changed.wait()

    def _change(self, state: EngineState, ready: Ready | None) -> None:
        self.state, self.ready = state, ready
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    def send(self, message: EngineMessage) -> None:
        """Send to the current P1; a message to a dead one is lost."""
        if self._engine.sender is not None and self.state != "dead":
            self._engine.sender.send(message)

    def replace(self, reason: str) -> None:
        """Kill P1, by no request's fault, so that the next one starts."""
        self._replace(Fault("lost_messages", reason))

    async def close(self) -> None:
        """End P1 by a `Shutdown`, then by SIGKILL: it blocks other signals."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._change("dead", self.ready)
        engine, standby = self._engine, self._standby
        if standby is not None:
            standby.process.kill()
            await asyncio.to_thread(standby.end, 1.0)
            standby.close()
        # One that got no sockets never starts to serve.
        timeout_s = 0.0 if engine.sender is None else self._shutdown_timeout_s
        if engine.sender is not None and engine.process.is_alive():
            # Waits for a connection, which a P1 that hangs while it starts never makes.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await engine.sender.send(Shutdown())
        await asyncio.to_thread(engine.end, timeout_s)
        engine.close()

    # ---- starts and ends ------------------------------------------------------------------------

    async def _supervise(self) -> None:
        try:
            while True:
                engine_exit = await self._run_engine()
                if not self._may_restart():
                    break
                await self._pause(engine_exit)
                self._engine = await self._next_engine()
                self.num_restarts += 1
                assert self._config is not None, "a P1 that was configured had one"
                self._engine.configure(self._config)
        except Exception:
            logger.exception("the engine process can be supervised no longer; it is ended")
            self._engine.process.kill()
            engine_exit = EngineExit(cause="lost_messages")
        self._close_engine("dead", engine_exit)

    def _may_restart(self) -> bool:
        """Whether the next start may succeed: not if the first one says that it cannot.

        By its exit status: a signal is not P1's own word.
        """
        exit_code = self._engine.process.exitcode
        return self._was_ready or (exit_code is not None and exit_code < 0)

    async def _pause(self, engine_exit: EngineExit) -> None:
        """Tell of P1's end, and wait where it ends again and again."""
        pause_s = self._breaker.note_exit()
        if pause_s:
            logger.error("the engine process ends too often; the next one in %.0f s", pause_s)
            await self._close_for(pause_s, engine_exit)
        else:
            self._close_engine("restarting" if self._was_ready else "starting", engine_exit)

    async def _close_for(self, pause_s: float, engine_exit: EngineExit) -> None:
        """Tell that no P1 comes soon, and wait."""
        self._retry_at = time.monotonic() + pause_s
        self._close_engine("paused" if self._was_ready else "starting", engine_exit)
        await asyncio.sleep(pause_s)
        self._retry_at = None
        self._change("restarting" if self._was_ready else "starting", None)

    async def _next_engine(self) -> EngineProcess:
        """Return the standby, or a new process, as soon as the system has room for one."""
        standby, self._standby = self._standby, None
        if standby is not None and standby.process.is_alive():
            return standby
        if standby is not None:
            standby.close()
        while (engine := self._spawn()) is None:
            # The end was told of before: it is nobody's fault a second time.
            await self._close_for(FIRST_PAUSE_S, EngineExit(cause="lost_messages"))
        return engine

    def _spawn(self) -> EngineProcess | None:
        """Return a new process; None if the system has no room for one at present."""
        try:
            return EngineProcess.spawn(self._options)
        except OSError as error:
            logger.error("no engine process can be spawned (%s)", error)
            return None

    async def _run_engine(self) -> EngineExit:
        """Relay messages until P1 ends."""
        engine = self._engine
        engine.open()
        self._watch, self._fault, self._num_received = self._make_watch(), None, 0
        died = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(engine.process.sentinel, died.set)
        tasks = [
            asyncio.create_task(self._relay(engine), name="relay"),
            asyncio.create_task(self._watch_silence(), name="watch-silence"),
        ]
        tasks[0].add_done_callback(self._end_unreadable)
        try:
            await died.wait()
        finally:
            loop.remove_reader(engine.process.sentinel)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(engine.process.join)
        return await self._report(engine)

    async def _report(self, engine: EngineProcess) -> EngineExit:
        """Log all that is known of P1's end, as one record; not what `wait_ready` tells."""
        lines = await asyncio.to_thread(engine.finish_stderr)
        exit_code = engine.process.exitcode
        engine_exit = EngineExit(cause=self._find_cause(), request_ids=engine.read_computed())
        if (error := engine.read_error()) is not None:
            self._start_error, lines = error, [error]
            if not self._may_restart():
                return engine_exit
        reason = "" if self._fault is None else f", since it {self._fault.text}"
        logger.error(
            "the engine process (pid %s) ended by %s%s, after %d restarts; it computed %s; its "
            "last lines: %s",
            *(engine.process.pid, describe_exit(exit_code), reason, self.num_restarts),
            ", ".join(engine_exit.request_ids) or "nothing",
            " | ".join(lines) or "none, or above",
        )
        return engine_exit

    def _find_cause(self) -> ExitCause:
        if self._fault is not None:
            return self._fault.cause
        exit_code = self._engine.process.exitcode
        if exit_code == MESSAGES_LOST_STATUS:
            return "lost_messages"
        return "killed" if -(exit_code or 0) in _SIGNALS_FROM_OUTSIDE else "crash"

    def _close_engine(self, state: EngineState, engine_exit: EngineExit) -> None:
        self._engine.close()
        self.heartbeat = None
        self._change(state, None)
        if self._listener is not None:
            _notify(partial(self._listener.on_exit, engine_exit))

    # ---- while P1 runs --------------------------------------------------------------------------

    def _make_watch(self) -> EngineWatch:
        return EngineWatch(timeout_s=self._hang_timeout_s, pid=self._engine.process.pid)

    def _replace(self, fault: Fault) -> None:
        """Kill P1, so that the next one starts."""
        if self._fault is None:
            self._fault = fault
            logger.error("the engine process %s; it is replaced", fault.text)
            self._engine.process.kill()

    def _end_unreadable(self, relay: "asyncio.Task[None]") -> None:
        """Replace a P1 whose messages cannot be read."""
        error = None if relay.cancelled() else relay.exception()
        if isinstance(error, MessagesLostError):
            self._replace(Fault("lost_messages", f"has lost messages on the way ({error})"))
        elif error is not None:
            logger.error("nothing of the engine process can be read", exc_info=error)
            self._replace(Fault("lost_messages", "cannot be read"))

    async def _relay(self, engine: EngineProcess) -> None:
        receiver, listener = engine.receiver, self._listener
        assert receiver is not None, "opened by `_run_engine`"
        assert listener is not None, "given to `start`"
        while True:
            message = await receiver.receive()
            self._watch.note_message()
            if isinstance(message, Heartbeat):
                self._check(engine, message)
                continue
            self._num_received += 1
            if isinstance(message, StepOutput):
                self._breaker.note_progress()
            if isinstance(message, EngineEvent):
                _notify(partial(listener.on_message, message))
            elif isinstance(message, Ready):
                self._on_ready(message)
            elif isinstance(message, Remainder):
                self._fail_unread(message, listener)
            else:
                logger.error("P1 sent a %s; ignored", type(message).__name__)

    def _fail_unread(self, remainder: Remainder, listener: EngineListener) -> None:
        """Tell of a message that cannot be decoded: the requests that it is lost for fail."""
        _notify(partial(listener.on_message, remainder.output))
        for request_id in remainder.request_ids:
            failed = RequestFailed(request_id=request_id, message="its output could not be read")
            _notify(partial(listener.on_message, failed))
        self.send(AbortRequests(request_ids=remainder.request_ids))

    def _on_ready(self, ready: Ready) -> None:
        self._was_ready = True
        self._breaker.note_ready()
        self._change("ready", ready)
        if self._has_standby and self._standby is None:
            self._standby = self._spawn()
        if self._listener is not None:
            _notify(self._listener.on_ready)

    def _check(self, engine: EngineProcess, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        num_sent = 0 if engine.sender is None else engine.sender.num_sent
        fault = self._watch.check(heartbeat, num_sent=num_sent, num_received=self._num_received)
        if fault is not None:
            self._replace(fault)

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(self._watch.silence.interval_s)
            fault = self._watch.tick()
            # A P1 that starts says nothing; one that was stopped will not, either.
            if fault is not None and (self.state == "ready" or fault.cause == "killed"):
                self._replace(fault)


def _notify(callback: Callable[[], None]) -> None:
    """Call the listener; its exceptions must not end the tasks that serve all requests."""
    try:
        callback()
    except Exception:
        logger.exception("what the engine process said or did could not be taken in")
