"""Processes that do for the server what could crash, fill or hold it: a fault costs one request.

Media are decoded, grammars read and requests' own chat templates rendered in them. A thread that
has a job takes an idle process, puts the input into the memory that both share, waits, and takes
the result from there. What a process says is not trusted: sizes are checked, and the memory cannot
shrink while it is mapped.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal

from mmjax.decoders.shared_memory import SharedMemory, create_shared_memory
from mmjax.decoders.worker import MAX_MESSAGE_BYTES, JobKind
from mmjax.errors import MMJaxError, RequestValueError
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

_KEPT_BYTES = 32 * 2**20
"""Shared memory that an idle process keeps; new pages cost a quarter of the time that a JPEG of two
megapixels takes."""

_START_TIMEOUT_S = 60.0
_SIGNALS_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit statuses of a process that somebody else ended."""
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME")
"""What they get of the environment: no keys."""


class WorkerError(MMJaxError):
    """A job gave nothing: it took too long or too much memory, or its process failed.

    "start": no job has ended the process.
    """

    def __init__(self, reason: Literal["time", "memory", "fault", "start"]) -> None:
        super().__init__(reason)
        self.reason = reason


class WorkerPool:
    """A fixed number of processes for jobs of one kind; many threads share them."""

    def __init__(
        self,
        kind: JobKind,
        num_workers: int,
        *,
        timeout_s: float,
        memory_bytes: int,
        cpu_seconds: float = 0.0,
        starts_now: bool = False,
        is_fresh: bool = False,
    ) -> None:
        """Start no process before its first job, without `starts_now`; wait for none.

        Args:
            kind: The jobs.
            num_workers: At least 1.
            timeout_s: Seconds that one job may take.
            memory_bytes: What a job may take, beside the shared memory.
            cpu_seconds: Seconds that one job may compute; 0: as many as there are.
            starts_now: Whether the processes are started.
            is_fresh: Whether each job gets a process that has done none before.
        """
        self._timeout_s = timeout_s
        self._cpu_seconds = cpu_seconds
        self._is_fresh = is_fresh
        self._workers = [_Worker(kind, memory_bytes) for _ in range(num_workers)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            if starts_now:
                worker.start()
            self._idle.put(worker)

    @contextmanager
    def run(
        self, operation: str, data: bytes, **options: Any
    ) -> Iterator[tuple[Mapping[str, Any], SharedMemory]]:
        """Do a job; yield the reply and the memory with its result. WorkerError if it gives none.

        The process counts as busy until the result is taken. What is raised meanwhile says that the
        reply was wrong, but for RequestValueError.
        """
        worker = self._idle.get()
        job: dict[str, Any]
        job = {"operation": operation, "num_bytes": len(data), "options": options}
        job["cpu_seconds"] = self._cpu_seconds
        try:
            yield self._call(worker, job, data), worker.memory
        except RequestValueError:
            raise
        except (KeyError, OSError, TypeError, ValueError) as error:
            worker.stop()
            logger.error("a worker process gave a wrong reply: %s", type(error).__name__)
            raise WorkerError("fault") from None
        except BaseException:
            worker.stop()
            raise
        finally:
            if self._is_fresh:
                worker.restart()
            worker.drop_memory()
            self._idle.put(worker)

    def run_text(self, operation: str, data: bytes) -> bytes:
        """Do a job whose result is bytes."""
        with self.run(operation, data) as (reply, memory):
            return memory.read(reply["num_bytes"])

    def close(self) -> None:
        """End the processes; whoever waits for one gets an error. Idempotent."""
        for worker in self._workers:
            worker.close()

    def _call(
        self, worker: "_Worker", job: Mapping[str, Any], data: bytes, *, may_repeat: bool = True
    ) -> Mapping[str, Any]:
        operation = job["operation"]
        try:
            reply = worker.call(job, data, self._timeout_s)
        except TimeoutError:
            worker.stop()
            logger.warning("%s took more than %g s: given up", operation, self._timeout_s)
            raise WorkerError("time") from None
        except OSError:
            reason = "fault" if worker.is_ready else "start"
            status = worker.stop()
            logger.warning("%s ended its process with status %s", operation, status)
            if may_repeat and status in _SIGNALS_FROM_OUTSIDE:
                # Not the job's doing, most likely; if it is, it costs two processes.
                return self._call(worker, job, data, may_repeat=False)
            raise WorkerError(reason) from None
        if reply.get("error") == "memory":
            worker.stop()
            logger.warning("%s took more memory than it may", operation)
            raise WorkerError("memory")
        return reply


class _Worker:
    """One process, used by one thread at a time; started again when it is needed."""

    def __init__(self, kind: JobKind, memory_bytes: int) -> None:
        self._kind = kind
        self._memory_bytes = memory_bytes
        self._channel: socket.socket | None = None
        self._is_closed = False
        self.is_ready = False
        self.memory = create_shared_memory()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> socket.socket:
        """Start a process with memory of its own, which says when it is ready; return its socket.

        OSError where the host has no room for one.
        """
        former, self.memory = self.memory, create_shared_memory()
        former.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = (theirs.fileno(), self.memory.descriptor)
            arguments = [str(number) for number in (*descriptors, self._memory_bytes)]
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "mmjax.decoders.worker", self._kind, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    # Ctrl-C is for the server, which drains.
                    start_new_session=True,
                    env=_environment(),
                )
            except OSError:
                ours.close()
                raise
        self._channel = ours
        return ours

    def call(self, job: Mapping[str, Any], data: bytes, timeout_s: float) -> dict[str, Any]:
        """Send a job about `data`; OSError if the process has ended, TimeoutError if slow."""
        if self._is_closed:
            raise ConnectionResetError
        channel = self._channel or self.start()
        if not self.is_ready:
            _receive(channel, _START_TIMEOUT_S)
            self.is_ready = True
        self.memory.write(data)
        channel.send(json.dumps(job).encode())
        return _receive(channel, timeout_s)

    def drop_memory(self) -> None:
        """Free what a large job took."""
        if self._is_closed or self.memory.num_used_bytes <= _KEPT_BYTES:
            return
        try:
            self.memory.free()
        except (OSError, ValueError):
            self.restart()

    def restart(self) -> None:
        """Have a new process, without waiting for it; where none starts, the next call tries."""
        self.stop()
        if not self._is_closed:
            with suppress(OSError):
                self.start()

    def stop(self) -> int | None:
        """Kill the process, if there is one; the next call starts another."""
        process, channel = self.process, self._channel
        self.process = self._channel = None
        self.is_ready = False
        if channel is not None:
            channel.close()
        if process is None:
            return None
        with suppress(ProcessLookupError):
            process.kill()
        return process.wait()

    def close(self) -> None:
        """Kill the process for good. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.stop()
            self.memory.close()


def _receive(channel: socket.socket, timeout_s: float) -> dict[str, Any]:
    channel.settimeout(timeout_s)
    reply = channel.recv(MAX_MESSAGE_BYTES)
    if not reply:
        raise ConnectionResetError
    return json.loads(reply)


def _environment() -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    # Packages are found where this process found them, also in a checkout that is not installed.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    return {**passed, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
