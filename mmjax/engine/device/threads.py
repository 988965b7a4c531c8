"""The threads that compute steps, as the system counts them: whether they work, or only wait."""

import contextlib
import faulthandler
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax._src import compiler

from mmjax.engine.device import compilation

MIN_CPU_SHARE = 0.05
"""The least share of CPU time in an interval in which threads work and find a free CPU."""
MIN_BUSY_SHARE = 0.5
"""The least share of time in which they compute or queue for a CPU. A thread that sleeps, and
looks now and then whether it may go on, queues for a while each time."""
_TASKS = Path("/proc/self/task")


def _as_told(path: str | Path) -> str:
    """Return a path as `faulthandler` writes it."""
    return str(path).encode("ascii", "backslashreplace").decode()


_COMPILERS = (_as_told(compiler.__file__), _as_told(compilation.__file__))
_CALLERS = (_as_told(Path(jax.__file__).parent), _as_told(Path(__file__).parent))
"""Where the code lies that calls the devices, and waits for them."""
_KERNEL_THREADS = "tf_XLAEigen"
"""The CPU's name of those that compute parts of one operation, and nothing else."""
_MEMORY_FILES = hasattr(os, "memfd_create")
"""Where the system has none, it has no `_TASKS`, either."""
_THREAD_OR_FILE = re.compile(r'^(?:Current t|T)hread 0x([0-9a-f]+)|^  File "(.*)", line ', re.M)
"""In what `faulthandler` tells: of each thread a line, then of each call, the innermost first."""


class _Times(NamedTuple):
    """What a thread has had so far."""

    cpu_s: float = 0.0
    queue_s: float = 0.0
    """In which it waited for a CPU; added when it gets one."""

    def since(self, before: "_Times") -> "_Times":
        return _Times(self.cpu_s - before.cpu_s, self.queue_s - before.queue_s)


class DeviceThreads(NamedTuple):
    """The system's ids of the threads that compute for the devices."""

    kernels: frozenset[int] = frozenset()
    """Those that never compile."""
    others: frozenset[int] = frozenset()
    """Those that run programs, and those that compile some: they have no names."""


def open_devices() -> DeviceThreads:
    """Open JAX's devices; return their threads, which start with them."""
    jax.local_devices()
    python = {thread.native_id for thread in threading.enumerate()}
    threads = {one: _read(one, "comm").strip() for one in _read_times() if one not in python}
    kernels = frozenset(one for one, name in threads.items() if name == _KERNEL_THREADS)
    return DeviceThreads(kernels, frozenset(threads) - kernels)


class StepThreads:
    """Finds out whether a step goes on: in its own thread, or in those that it waits for.

    Others do not count: programs compile beside it, adapters are read, heartbeats are sent.
    """

    def __init__(self, devices: DeviceThreads) -> None:
        """Look at the calling thread, which runs the steps, and at the devices'."""
        self._ident, self._native_id = threading.get_ident(), threading.get_native_id()
        self._devices = devices
        self._times = _read_times()
        self._needed: set[int] = set()
        self._looked_at = time.monotonic()

    def look(self) -> bool:
        """Return whether they have computed since the last look, or have waited for a CPU.

        Those count that the step needed then or needs now: a step that has just come out of its
        compiler has itself done nothing while that worked.
        """
        before, self._times = self._times, _read_times()
        elapsed, self._looked_at = time.monotonic() - self._looked_at, time.monotonic()
        needed_before, self._needed = self._needed, self._find_threads(_find_files())
        threads = (needed_before | self._needed) & self._times.keys()
        since = [self._times[one].since(before.get(one, _Times())) for one in threads]
        cpu_s = sum(one.cpu_s for one in since)
        busy_s = cpu_s + sum(one.queue_s for one in since)
        return cpu_s >= MIN_CPU_SHARE * elapsed or busy_s >= MIN_BUSY_SHARE * elapsed

    def _find_threads(self, code: Mapping[int, Sequence[str]]) -> set[int]:
        """Return the threads that the step needs now, by the code that its own one is in."""
        files = code.get(self._ident, ())
        if any(file in _COMPILERS for file in files):
            return self._times.keys() - {threading.get_native_id()}
        threads = {self._native_id, *self._devices.kernels}
        if files and files[0].startswith(_CALLERS):
            # A program that has called Python waits for that alone.
            threads |= self._find_callbacks(code) or self._devices.others
        return threads

    def _find_callbacks(self, code: Mapping[int, Sequence[str]]) -> frozenset[int]:
        """Return the devices' threads that run Python code, which begins in JAX for no other."""
        begins = ((ident, files[-1]) for ident, files in code.items() if files)
        callbacks = [_native_id(ident) for ident, file in begins if file.startswith(_CALLERS[0])]
        return self._devices.others.intersection(callbacks)


def _find_files() -> dict[int, list[str]]:
    """Return the files of the code that each Python thread is in, the innermost first.

    Not by `sys._current_frames`: it makes objects of other threads' frames. A garbage collection
    that this starts may let these threads go on, and what is made is of frames that are no more:
    with CPython 3.11 that ended the process by SIGSEGV.
    """
    if not _MEMORY_FILES:
        return {}
    descriptor = os.memfd_create("threads")
    try:
        faulthandler.dump_traceback(descriptor)
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("ascii", "replace")
    finally:
        os.close(descriptor)
    files: dict[int, list[str]] = {}
    own: list[str] = []
    for ident, file in _THREAD_OR_FILE.findall(text):
        if ident:
            own = files.setdefault(int(ident, 16), [])
        else:
            own.append(file)
    return files


def _native_id(ident: int) -> int:
    """Return the system's id of a thread that runs Python code: its CPU clock is named after it."""
    return ~(time.pthread_getcpuclockid(ident) >> 3)


def _read_times() -> dict[int, _Times]:
    """Return what each thread has had, by its id.

    Where the system does not tell, the process's time counts as its main thread's.
    """
    times = {}
    for path in _TASKS.glob("*/schedstat"):
        thread = int(path.parent.name)
        if fields := _read(thread, "schedstat").split():
            times[thread] = _Times(int(fields[0]) * 1e-9, int(fields[1]) * 1e-9)
    return times or {threading.main_thread().native_id or 0: _Times(time.process_time())}


def _read(thread: int, name: str) -> str:
    """Return what the system tells of a thread; nothing of one that has just ended."""
    with contextlib.suppress(OSError):
        return (_TASKS / str(thread) / name).read_text()
    return ""
