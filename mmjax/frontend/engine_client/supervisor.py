"""Starts P1, monitors it, and restarts it when it dies.

Knows nothing of requests: a listener is called when P1 ends and when it is ready.
"""

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal, Protocol, runtime_checkable

from mmjax.config import EngineConfig, LogFormat, LogLevel
from mmjax.errors import MMJaxError
from mmjax.logger import configure_logging, get_logger, reporting
from mmjax.transport.channel import AsyncReceiver, AsyncSender, IpcDirectory
from mmjax.transport.messages import (
    AdapterLoaded,
    CacheMiss,
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

EngineState = Literal["starting", "ready", "restarting", "dead"]


class EngineStartError(MMJaxError):
    """P1 ended before it was ready."""


@runtime_checkable
class EngineListener(Protocol):
    """The callbacks of a supervisor: P1's messages, ends and starts."""

    def on_message(self, message: StepOutput | RequestFailed | CacheMiss | AdapterLoaded) -> None:
        """Handle a message of P1 about requests or adapters."""

    def on_exit(self) -> None:
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
        """Whether the engine runs and sends heartbeats."""
        ...

    async def start(self, listener: EngineListener) -> None:
        """Start to relay the engine's messages."""

    async def wait_started(self) -> None:
        """Wait until `state` is no longer "starting"."""

    async def send(self, message: EngineMessage) -> None:
        """Send to the engine."""

    async def close(self) -> None:
        """End the engine."""


@dataclass(slots=True, kw_only=True)
class _EngineProcess:
    """One P1 with its own sockets, so that the next P1 does not read what was sent to this one."""

    directory: IpcDirectory
    process: BaseProcess
    configs: Connection
    """Where the process, which meanwhile imports JAX, waits for its configuration."""
    sender: AsyncSender | None = None
    receiver: AsyncReceiver | None = None

    @classmethod
    def spawn(cls, main: str, log_level: LogLevel, log_format: LogFormat) -> "_EngineProcess":
        directory = IpcDirectory()
        theirs, ours = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=_run_child,
            args=(main, theirs, directory, log_level, log_format),
            name="mmjax-engine",
            daemon=True,
        )
        # The child inherits the signal mask, so that Ctrl-C, which the whole process group gets,
        # does not end it. Start the resource tracker before: its start unblocks SIGINT.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return cls(directory=directory, process=process, configs=ours)

    def configure(self, config: EngineConfig) -> None:
        # Of a process that has ended, supervision tells.
        with contextlib.suppress(BrokenPipeError):
            self.configs.send(config)
        self.configs.close()

    def open(self) -> None:
        self.sender = AsyncSender(self.directory.address("in"), bind=True)
        self.receiver = AsyncReceiver(self.directory.address("out"), bind=True)

    def close(self) -> None:
        for pipe in (self.sender, self.receiver):
            if pipe is not None:
                pipe.close()
        self.configs.close()
        self.directory.close()


class SilenceTimer:
    """Measures how long another process has sent nothing, while this one was able to receive.

    A tick that came late counts as one interval, so that a process that was stopped, or a machine
    that was suspended, does not count its own pause as the other's silence.
    """

    def __init__(self, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Expire after `timeout_s`; call `tick` every `interval_s` seconds."""
        self.interval_s = min(1.0, timeout_s / 4)
        self._timeout_s = timeout_s
        self._clock = clock
        self._last_tick = clock()
        self._seconds = 0.0
        self._num_late_ticks = 0

    @property
    def seconds(self) -> float:
        """Seconds of silence."""
        return self._seconds + min(self._clock() - self._last_tick, self.interval_s)

    def reset(self) -> None:
        """Restart at 0, since a message was received."""
        self._seconds = 0.0
        self._num_late_ticks = 0
        self._last_tick = self._clock()

    def tick(self) -> bool:
        """Count the time since the last tick; return whether the timeout is exceeded.

        That takes two ticks, between which messages are read that came while this process stopped.
        """
        self._seconds = self.seconds
        self._last_tick = self._clock()
        self._num_late_ticks = self._num_late_ticks + 1 if self.is_expired else 0
        return self._num_late_ticks > 1

    @property
    def is_expired(self) -> bool:
        """Whether the silence has reached the timeout."""
        return self.seconds >= self._timeout_s


class Supervisor:
    """Owns P1, which is spawned on construction, so that it loads before the event loop runs."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        main: str = ENGINE_MAIN,
        heartbeat_timeout_s: float = 60.0,
        shutdown_timeout_s: float = 5.0,
        log_level: LogLevel = "info",
        log_format: LogFormat = "text",
    ) -> None:
        """Without `config` P1 imports what it needs, and waits for `configure`."""
        self.state: EngineState = "starting"
        self.ready: Ready | None = None
        self.heartbeat: Heartbeat | None = None
        self.num_restarts = 0
        self._config = config
        self._spawn = lambda: _EngineProcess.spawn(main, log_level, log_format)
        self._silence = SilenceTimer(timeout_s=heartbeat_timeout_s)
        self._shutdown_timeout_s = shutdown_timeout_s
        self._listener: EngineListener | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._has_ended = asyncio.Event()
        self._has_started = asyncio.Event()
        self._is_ready = asyncio.Event()
        self._engine = self._spawn()
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
        """Whether P1 runs and sends heartbeats (none are expected during its start)."""
        if self.state == "ready":
            return not self._silence.is_expired
        return self.state == "starting"

    async def start(self, listener: EngineListener) -> None:
        """Open the sockets and monitor P1, in the running event loop."""
        self._listener = listener
        self._tasks = [
            asyncio.create_task(self._supervise(), name="supervise"),
            asyncio.create_task(self._watch_heartbeat(), name="watch-heartbeat"),
        ]

    async def wait_started(self) -> None:
        """Wait until the first P1 is ready, or has ended."""
        await self._has_started.wait()

    async def wait_ready(self) -> Ready:
        """Wait until P1 is ready; EngineStartError if its start failed."""
        waits = [asyncio.create_task(event.wait()) for event in (self._is_ready, self._has_ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.ready is None:
            raise EngineStartError("the engine process ended before it was ready; see its log")
        return self.ready

    async def send(self, message: EngineMessage) -> None:
        """Send to the current P1; a message to a dead one is lost."""
        if self._engine.sender is not None and self.state != "dead":
            await self._engine.sender.send(message)

    async def close(self) -> None:
        """End P1 by a `Shutdown`, then by signals."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.state = "dead"
        engine = self._engine
        if engine.sender is not None and engine.process.is_alive():
            await engine.sender.send(Shutdown())
        # One that got no sockets never starts to serve.
        timeout_s = 0.0 if engine.sender is None else self._shutdown_timeout_s
        await asyncio.to_thread(_end_process, engine.process, timeout_s)
        engine.close()

    # ---- starts and ends ------------------------------------------------------------------------

    async def _supervise(self) -> None:
        try:
            # Restart only a P1 that was ready: one that died during its start would die again.
            while await self._run_engine():
                self._close_engine("restarting")
                self.num_restarts += 1
                assert self._config is not None, "a P1 that was ready had one"
                self._engine = self._spawn()
                self._engine.configure(self._config)
        except Exception:
            logger.exception("the engine process can be supervised no longer; it is ended")
            self._engine.process.kill()
        self._close_engine("dead")
        self._has_ended.set()

    async def _run_engine(self) -> bool:
        """Relay messages until P1 ends; return whether it was ready."""
        self._engine.open()
        died = asyncio.Event()
        loop = asyncio.get_running_loop()
        process = self._engine.process
        loop.add_reader(process.sentinel, died.set)
        relay = asyncio.create_task(self._relay(), name="relay")
        relay.add_done_callback(self._end_unreadable)
        try:
            await died.wait()
        finally:
            loop.remove_reader(process.sentinel)
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)
        await asyncio.to_thread(process.join)
        logger.error(
            "the engine process (pid %s) ended with exit code %s", process.pid, process.exitcode
        )
        return self.ready is not None

    def _close_engine(self, state: EngineState) -> None:
        self._engine.close()
        self.ready = self.heartbeat = None
        self._is_ready.clear()
        self.state = state
        self._has_started.set()
        if self._listener is not None:
            _notify(self._listener.on_exit)

    def _end_unreadable(self, relay: "asyncio.Task[None]") -> None:
        """End a P1 whose messages cannot be decoded."""
        if not relay.cancelled():
            logger.error(
                "nothing of the engine process can be read; it is ended",
                exc_info=relay.exception(),
            )
            self._engine.process.kill()

    async def _relay(self) -> None:
        receiver, listener = self._engine.receiver, self._listener
        assert receiver is not None, "opened by `_run_engine`"
        assert listener is not None, "given to `start`"
        while True:
            message = await receiver.receive()
            self._silence.reset()
            match message:
                case Ready():
                    self.ready, self.state = message, "ready"
                    self._has_started.set()
                    self._is_ready.set()
                    _notify(listener.on_ready)
                case Heartbeat():
                    self.heartbeat = message
                case StepOutput() | RequestFailed() | CacheMiss() | AdapterLoaded():
                    _notify(partial(listener.on_message, message))
                case _:
                    logger.error("P1 sent a %s; ignored", type(message).__name__)

    async def _watch_heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._silence.interval_s)
            if self._silence.tick() and self.state == "ready":
                logger.error("the engine process is silent for too long; it is ended")
                self._engine.process.kill()


def _notify(callback: Callable[[], None]) -> None:
    """Call the listener; its exceptions must not end the tasks that serve all requests."""
    try:
        callback()
    except Exception:
        logger.exception("what the engine process said or did could not be taken in")


def _end_process(process: BaseProcess, timeout_s: float) -> None:
    process.join(timeout_s)
    for end in (process.terminate, process.kill):
        if process.is_alive():
            end()
            process.join(1.0)


# ---- in P1 -------------------------------------------------------------------------------------


def _run_child(
    main: str,
    configs: Connection,
    directory: IpcDirectory,
    log_level: LogLevel,
    log_format: LogFormat,
) -> None:
    # The whole process group gets Ctrl-C, but P0 decides when P1 ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(
        target=_exit_with_parent, args=(directory,), daemon=True, name="watch-parent"
    ).start()
    configure_logging(log_level, process="P1", log_format=log_format)
    module, _, name = main.partition(":")
    with reporting(logger, lambda: "importing JAX"):
        run: Callable[[EngineConfig, str, str], None] = getattr(
            importlib.import_module(module), name
        )
    try:
        config: EngineConfig = configs.recv()
    except EOFError:
        # P0 ended before it had read the configuration.
        directory.close()
        return
    try:
        run(config, directory.address("in"), directory.address("out"))
    except MMJaxError as error:
        # A wrong checkpoint or setting: the message is enough, without a traceback.
        print(f"mmjax engine: {error}", file=sys.stderr)
        sys.exit(1)


def _exit_with_parent(directory: IpcDirectory) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # P0, which created it, was killed.
        directory.close()
        # Only `_exit` ends the process from a thread.
        os._exit(1)
