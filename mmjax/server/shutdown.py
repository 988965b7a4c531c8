"""The shutdown of the server's process: gracefully at a first signal, at once at a second one.

Imports nothing slow, since it is installed first of all.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

CLOSE_TIMEOUT_S = 10.0
"""Seconds that the engine and the threads have to end, after the running requests."""

_JOIN_S = 0.5


class Interrupted(BaseException):
    """A signal was received before the server could drain."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name} before the server was ready")
        self.exit_status = _exit_status(number)


class Shutdown:
    """Handles SIGTERM and SIGINT for the whole life of the process."""

    def __init__(self) -> None:
        self.timeout_s = 0.0
        """Seconds that running requests have to finish."""
        self._drain: Callable[[], None] | None = None
        self.number = 0
        """The signal that was received; 0: none."""

    def drain_with(self, drain: Callable[[], None]) -> None:
        """Call `drain` on a signal from now on; before, `Interrupted` is raised.

        Raises it here for an earlier signal: raised within an import or a callback, it may have
        been swallowed there.
        """
        if self.number:
            raise Interrupted(self.number)
        self._drain = drain

    def install(self) -> None:
        """Install the signal handlers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)

    def uninstall(self) -> None:
        """Restore the default signal handlers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Start to shut down, or, at a second signal, end the process."""
        if self.number:
            _end_now(number, "a second signal")
        self.number = number
        signal.signal(signal.SIGALRM, lambda *_: _end_now(number, "the time to shut down is over"))
        signal.setitimer(signal.ITIMER_REAL, self.timeout_s + CLOSE_TIMEOUT_S)
        if self._drain is None:
            raise Interrupted(number)
        self._drain()


def leave(status: int) -> NoReturn:
    """End the process with `status`, without waiting for threads."""
    workers = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.daemon
    ]
    for thread in workers:
        thread.join(_JOIN_S)
    if any(thread.is_alive() for thread in workers):
        sys.stdout.flush()
        os._exit(status)
    # The interpreter's end restores the default handler, by which the timer would end the process.
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.exit(status)


def _end_now(number: int, reason: str) -> None:
    # Whatever became of stderr: nobody may read it any more, and the signal may have interrupted
    # a write to `sys.stderr`, which then takes no other one.
    with contextlib.suppress(OSError):
        os.write(2, f"mmjax.serve: {reason}; ended at once\n".encode())
    # The interpreter would wait for threads, which cannot be ended.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(_exit_status(number))


def _exit_status(number: int) -> int:
    # As shells do.
    return 128 + number
