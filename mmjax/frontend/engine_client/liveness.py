"""Whether P1 is alive and goes on: its silence, its turns, what it has read; when it is restarted.

Knows P1's heartbeats and, where the system has /proc, what its threads do.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mmjax.frontend.engine_client.suspects import ExitCause
from mmjax.transport.messages import Heartbeat, LoopState

MAX_BUSY_SILENCE_S = 60.0
"""Longest silence of a P1 that uses the CPU, or waits for it or for a disk."""
MAX_TURN_S = 600.0
"""Longest turn, whatever the process does meanwhile: a step of a large model may take a minute."""
NUM_LOSS_TICKS = 4
"""Ticks during which every heartbeat lacks messages that were sent before."""


MAX_FRUITLESS_STARTS = 8
"""Ends in a row, without progress in between, after which the next start waits."""
PROGRESS_S = 10.0
"""A P1 that was ready for so long has made progress, also without requests."""
FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0


class Fault(NamedTuple):
    """Why P1 must be replaced."""

    cause: ExitCause
    text: str


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


class EngineWatch:
    """Finds out that one P1 hangs, or that messages to or from it were lost."""

    def __init__(self, *, timeout_s: float, pid: int | None = None) -> None:
        """Allow `timeout_s` of silence, or of a step that uses no CPU; watch the process `pid`."""
        self.silence = SilenceTimer(timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._activity = ProcessActivity(pid)
        self._last: LoopState | None = None
        self._num_sent = self._num_received = 0
        self._num_ticks = 0
        self._complete_at_tick = 0
        """The last tick before which no message was missing."""

    def note_message(self) -> None:
        """Take note of a message."""
        self.silence.reset()

    def tick(self) -> Fault | None:
        """Return the fault of a P1 that is silent for too long; call it every `interval_s`."""
        self._num_ticks += 1
        is_late, silence = self.silence.tick(), self.silence
        if silence.seconds < 2 * silence.interval_s:
            return None
        is_busy = self._activity.look() and silence.seconds < MAX_BUSY_SILENCE_S
        if is_busy or not is_late:
            return None
        state = "is stopped" if self._activity.is_stopped else "is silent"
        # A stopped process was stopped by someone else; a silent one hangs by itself.
        cause: ExitCause = "killed" if self._activity.is_stopped else "crash"
        return Fault(cause, f"{state} for {self.silence.seconds:.0f} s")

    def check(self, heartbeat: Heartbeat, *, num_sent: int, num_received: int) -> Fault | None:
        """Return what a heartbeat tells of a fault.

        Args:
            heartbeat: P1's last.
            num_sent: Messages that were sent to P1 before it came.
            num_received: Messages that had come from it, without heartbeats.
        """
        loop = heartbeat.loop
        if loop.turn_s >= MAX_TURN_S or loop.idle_s >= self._timeout_s:
            text = f"is in one step for {loop.turn_s:.0f} s, and idle for {loop.idle_s:.0f} s"
            return Fault("crash", text)
        if not self._is_short(loop, num_received):
            self._complete_at_tick = self._num_ticks
        self._last, self._num_sent, self._num_received = loop, num_sent, num_received
        if self._num_ticks - self._complete_at_tick >= NUM_LOSS_TICKS:
            return Fault("lost_messages", "and the server have lost messages")
        return None

    def _is_short(self, loop: LoopState, num_received: int) -> bool:
        """Whether a side turned over, and still lacks what was sent before the last heartbeat."""
        last = self._last
        if last is None:
            return False
        is_engine_short = (
            loop.num_turns > last.num_turns
            and loop.num_received == last.num_received
            and loop.num_received < self._num_sent
        )
        is_here_short = num_received == self._num_received and num_received < last.num_sent
        return is_engine_short or is_here_short


class RestartBreaker:
    """Counts ends of P1 without progress; says how long to wait before the next start.

    After each pause one start is tried: if it makes no progress, either, the next pause is twice
    as long; if it does, all is as in the beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_fruitless = 0
        self._ready_at: float | None = None

    def note_ready(self) -> None:
        """Take note that P1 is ready."""
        self._ready_at = self._clock()

    def note_progress(self) -> None:
        """Take note that P1 has generated tokens."""
        self._num_fruitless = 0

    def note_exit(self) -> float:
        """Take note of P1's end; return the seconds until it may be started again, mostly 0."""
        if self._ready_at is not None and self._clock() - self._ready_at >= PROGRESS_S:
            self._num_fruitless = 0
        self._ready_at = None
        self._num_fruitless += 1
        excess = self._num_fruitless - MAX_FRUITLESS_STARTS
        return 0.0 if excess < 0 else min(FIRST_PAUSE_S * 2.0**excess, MAX_PAUSE_S)


class ProcessActivity:
    """What a process has done between two looks: whether it computed, or was stopped."""

    def __init__(self, pid: int | None) -> None:
        self._folder = Path(f"/proc/{pid}")
        self._cpu_ticks = -1
        self.is_stopped = False

    def look(self) -> bool:
        """Return whether it used the CPU since the last look, or has a thread that waits for it.

        Or for a disk, as where memory is short and its pages must be read again.
        """
        fields = _read_stat(self._folder / "stat")
        if fields is None:
            return False
        # proc_pid_stat(5), counted behind the name: state is field 3, utime 14, stime 15.
        before, self._cpu_ticks = self._cpu_ticks, int(fields[11]) + int(fields[12])
        self.is_stopped = fields[0] == "T"
        return not self.is_stopped and (self._cpu_ticks > before >= 0 or self._has_waiting_thread())

    def _has_waiting_thread(self) -> bool:
        try:
            threads = os.listdir(self._folder / "task")
        except OSError:
            return False
        stats = (_read_stat(self._folder / "task" / thread / "stat") for thread in threads)
        # proc_pid_stat(5): R runs or is about to, D waits for a disk.
        return any(fields is not None and fields[0] in "RD" for fields in stats)


def _read_stat(path: Path) -> list[str] | None:
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return None
