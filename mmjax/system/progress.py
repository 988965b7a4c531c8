"""How far long work is: a bar on a terminal or in a notebook, lines of the log elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from mmjax.system.logger import MAX_SILENCE_S

_SHARE = 0.1
"""Of the work, between two lines."""


def has_bars() -> bool:
    """Return whether a bar can be drawn over itself: a redirected log would keep every state."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


@contextmanager
def progress(
    logger: logging.Logger, doing: str, total: int, *, unit: str = "", is_shown: bool = True
) -> Iterator[Callable[[int], object]]:
    """Yield what is called with each amount of work that is done, of `total`."""
    if not is_shown or has_bars():
        scale = unit == "B"
        with tqdm(
            total=total, desc=doing, unit=unit, unit_scale=scale, disable=not is_shown
        ) as bar:
            yield bar.update
    else:
        yield ProgressLines(logger, doing, total, unit=unit).update


class ProgressLines:
    """A line for each tenth of the work, if it takes long enough; the last at its end."""

    def __init__(
        self,
        logger: logging.Logger,
        doing: str,
        total: int,
        *,
        unit: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._doing = doing
        self._total = total
        self._size = tqdm.format_sizeof(total, unit) if unit else str(total)
        self._clock = clock
        self._start = self._last = clock()
        self._num_done = self._num_said = 0

    def update(self, amount: int) -> None:
        """Note that `amount` more is done."""
        self._num_done += amount
        now = self._clock()
        is_much = self._num_done - self._num_said >= _SHARE * self._total
        is_end = self._num_done >= self._total and self._num_said > 0
        if is_end or (is_much and now - self._last >= MAX_SILENCE_S):
            self._last, self._num_said = now, self._num_done
            share = self._num_done / max(self._total, 1)
            line = "%s: %.0f%% of %s after %.0f s"
            self._logger.info(line, self._doing, 100 * share, self._size, now - self._start)
