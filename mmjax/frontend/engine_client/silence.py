"""How long another process has been silent, while this one was awake to hear it."""

import time
from collections.abc import Callable


class Silence:
    """Counts silence turn by turn: one that took longer (this process was stopped) counts as one.

    So a process that was stopped, or a machine that was paused, does not take its own sleep for
    the other's.
    """

    def __init__(self, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Count against `timeout_s`; `take_turn` is to be called every `turn_s` seconds."""
        self.turn_s = min(1.0, timeout_s / 4)
        self._timeout_s = timeout_s
        self._clock = clock
        self._last_turn = clock()
        self._seconds = 0.0
        self._num_late_turns = 0

    @property
    def seconds(self) -> float:
        """How long the silence has lasted."""
        return self._seconds + min(self._clock() - self._last_turn, self.turn_s)

    def end(self) -> None:
        """Note that something was heard."""
        self._seconds = 0.0
        self._num_late_turns = 0
        self._last_turn = self._clock()

    def take_turn(self) -> bool:
        """Count the time since the last turn; return whether the silence has lasted too long.

        That takes two turns: what was said while this process slept is heard between them.
        """
        self._seconds = self.seconds
        self._last_turn = self._clock()
        self._num_late_turns = self._num_late_turns + 1 if self.is_too_long else 0
        return self._num_late_turns > 1

    @property
    def is_too_long(self) -> bool:
        """Whether the silence has reached the timeout."""
        return self.seconds >= self._timeout_s
