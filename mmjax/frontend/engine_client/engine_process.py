"""One P1: its process, the sockets to it, what it says on stderr, what it computed at its end."""

import contextlib
import faulthandler
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from mmjax.config.engine_config import EngineConfig
from mmjax.errors import MMJaxError
from mmjax.system.logger import LogFormat, LogLevel, configure_logging, get_logger, reporting
from mmjax.system.torch_free import is_torch_left_out, leave_torch_out
from mmjax.transport.channel import AsyncReceiver, AsyncSender, IpcDirectory
from mmjax.transport.step_record import create_step_record, read_step_record

logger = get_logger(__name__)

NUM_LAST_LINES = 20
"""Lines of P1's stderr in the report of its end."""
_MAX_LINE_BYTES = 500
_MAX_ERROR_BYTES = 16384
"""Longest text of the error that ends P1: a pipe takes it though nobody reads yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnOptions:
    """How a P1 is started."""

    main: str
    """`module:function`; by name, since P0 must not import it."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"


class StderrTail:
    """Copies another process's stderr to this one's, and keeps the last lines."""

    def __init__(self, source: Connection) -> None:
        self._source = source
        self._lines: deque[bytes] = deque([b""], maxlen=NUM_LAST_LINES + 1)
        self._thread = threading.Thread(target=self._copy, name="engine-stderr", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float = 1.0) -> list[str]:
        """Wait for the end of the stream, at most `timeout_s`; return the last lines."""
        self._thread.join(timeout_s)
        lines = [line.decode(errors="replace").strip() for line in self._lines]
        return [line for line in lines if line]

    def _copy(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while chunk := os.read(self._source.fileno(), 2**16):
                self._keep(chunk)
                _write_to_stderr(chunk)
        self._source.close()

    def _keep(self, chunk: bytes) -> None:
        first, *others = chunk.split(b"\n")
        self._lines[-1] = (self._lines[-1] + first)[:_MAX_LINE_BYTES]
        self._lines.extend(line[:_MAX_LINE_BYTES] for line in others)


def _write_to_stderr(chunk: bytes) -> None:
    # Whatever becomes of this process's stderr, the other's pipe must be read.
    with contextlib.suppress(OSError):
        while chunk:
            chunk = chunk[os.write(2, chunk) :]


@dataclass(slots=True, kw_only=True)
class EngineProcess:
    """A P1 with its own sockets, so that the next P1 does not read what was sent to this one."""

    directory: IpcDirectory
    process: BaseProcess
    configs: Connection
    """Where the process, which meanwhile imports JAX, waits for its configuration.

    It answers with the error that ends it, if one does.
    """
    tail: StderrTail | None
    """None on a terminal, where the lines stand above, and progress bars need it."""
    sender: AsyncSender | None = None
    receiver: AsyncReceiver | None = None

    @classmethod
    def spawn(cls, options: SpawnOptions) -> "EngineProcess":
        """Start a process, which imports what it needs and waits for `configure`."""
        directory = IpcDirectory()
        try:
            return cls._spawn_in(directory, options)
        except BaseException:
            directory.close()
            raise

    @classmethod
    def _spawn_in(cls, directory: IpcDirectory, options: SpawnOptions) -> "EngineProcess":
        create_step_record(directory.step_record_path)
        theirs, ours = multiprocessing.Pipe()
        reading, writing = (None, None) if os.isatty(2) else multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=_run_child,
            args=(options, theirs, writing, directory, is_torch_left_out()),
            name="mmjax-engine",
            daemon=True,
        )
        # The child inherits the signal mask: what a terminal sends to the whole group (Ctrl-C), or
        # a service manager to all processes (SIGTERM), does not end it, so that P0 can drain. Start
        # the resource tracker before: its start unblocks both.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        if writing is not None:
            writing.close()
        tail = None if reading is None else StderrTail(reading)
        return cls(directory=directory, process=process, configs=ours, tail=tail)

    def configure(self, config: EngineConfig) -> None:
        """Let the process start to serve."""
        # Of a process that has ended, supervision tells.
        with contextlib.suppress(BrokenPipeError):
            self.configs.send(config)

    def open(self) -> None:
        """Bind the sockets, in the running event loop."""
        self.sender = AsyncSender(self.directory.address("in"), bind=True)
        self.receiver = AsyncReceiver(self.directory.address("out"), bind=True)

    def close(self) -> None:
        """Close what is left of a process that has ended; not in another thread."""
        for pipe in (self.sender, self.receiver):
            if pipe is not None:
                pipe.close()
        self.configs.close()
        self.directory.close()

    def end(self, timeout_s: float) -> None:
        """End the process, by SIGKILL if it does not end by itself; blocks."""
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(1.0)
        self.finish_stderr()

    def read_computed(self) -> tuple[str, ...]:
        """Return the sequences that the process computed last."""
        return read_step_record(self.directory.step_record_path)

    def read_error(self) -> str | None:
        """Return the error that ended the process; None where it told none."""
        with contextlib.suppress(OSError, EOFError):
            if self.configs.poll():
                return self.configs.recv_bytes().decode(errors="replace")
        return None

    def finish_stderr(self) -> list[str]:
        """Return the last lines of an ended process's stderr; blocks for a moment."""
        return [] if self.tail is None else self.tail.finish()


def describe_exit(exit_code: int | None) -> str:
    """Return "signal SIGKILL" or "status 1"."""
    if exit_code is not None and exit_code < 0:
        try:
            return f"signal {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"signal {-exit_code}"
    return f"status {exit_code}"


# ---- in P1 -------------------------------------------------------------------------------------


def _run_child(
    options: SpawnOptions,
    configs: Connection,
    stderr: Connection | None,
    directory: IpcDirectory,
    is_torch_free: bool,
) -> None:
    if stderr is not None:
        os.dup2(stderr.fileno(), 2)
        stderr.close()
    # Where a fatal signal struck. Of the other threads there are too many for the report.
    faulthandler.enable(file=2, all_threads=False)
    # P0 decides when P1 ends; nothing in here shall unblock these.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(
        target=_exit_with_parent, args=(directory,), daemon=True, name="watch-parent"
    ).start()
    configure_logging(options.log_level, process="P1", log_format=options.log_format)
    if is_torch_free:
        leave_torch_out()
    module, _, name = options.main.partition(":")
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
        _tell(configs, str(error))
        sys.exit(1)
    except Exception as error:
        _tell(configs, f"{type(error).__name__}: {error}")
        raise
    _leave()


def _tell(configs: Connection, error: str) -> None:
    with contextlib.suppress(OSError):
        configs.send_bytes(error.encode(errors="replace")[:_MAX_ERROR_BYTES])


def _leave() -> None:
    """End the process now if threads compile: the interpreter would wait for them."""
    main = threading.main_thread()
    if any(not thread.daemon for thread in threading.enumerate() if thread is not main):
        logging.shutdown()
        os._exit(0)


def _exit_with_parent(directory: IpcDirectory) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        # P0, which created it, was killed.
        directory.close()
        # Only `_exit` ends the process from a thread.
        os._exit(1)
