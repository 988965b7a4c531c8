"""Which requests may have ended P1, and which one did.

P1 writes down what it computes (`transport.step_record`), so its death names suspects: the
requests of the steps on the device, and one that was being taken in. Usually none of them is at
fault: memory ran out, someone sent a signal. So:

- After a crash (a fatal signal, an exit status, a hang) each suspect is tried: it is sent again
  alone, before all others, and cleared by its first new token, which a request that ends P1 by
  what it asks for never gets. It then runs on beside the next one. A crash during its trial is its
  fault. One after the other rather than by halves: a trial takes a prefill, a wrong half takes a
  restart.
- SIGKILL and SIGTERM come from outside, and more likely at random: from an operator, or from the
  kernel, which may have run out of memory for the request's sake. Suspects are tried only if it
  happened twice without a new token in between, and only the fourth death during a trial is the
  request's fault.
- Messages that were lost between the processes are nobody's fault.

Knows nothing of processes or of messages: ids of requests in, ids out.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

ExitCause = Literal["crash", "killed", "lost_messages"]
"""Why P1 ended: by itself or hanging, by a signal from outside, or for messages that were lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExit:
    """An end of P1."""

    cause: ExitCause = "killed"
    request_ids: tuple[str, ...] = ()
    """The sequences that it computed, as it wrote them down."""


DEATHS_TO_TRY: dict[ExitCause, int] = {"crash": 1, "killed": 2}
"""Deaths without a new token after which a request is tried."""
DEATHS_TO_BLAME: dict[ExitCause, int] = {"crash": 1, "killed": 4}
"""Deaths during a request's trial."""


class Suspects:
    """The requests that were being computed when P1 ended, until they get a new token."""

    def __init__(self) -> None:
        self._num_deaths: dict[str, int] = {}
        """Ends of P1 since the request's last token."""
        self._trials: dict[str, int] = {}
        """Requests to try, in order, with how often P1 ended meanwhile."""

    @property
    def on_trial(self) -> str | None:
        """The request that must be alone among those without a new token; None: there is none."""
        return next(iter(self._trials), None)

    def on_exit(self, request_ids: Collection[str], cause: ExitCause) -> str | None:
        """Take note of P1's end while it computed these; return the request at fault."""
        if cause == "lost_messages":
            return None
        tried = self.on_trial
        if tried is not None and tried in request_ids:
            self._trials[tried] += 1
            if self._trials[tried] >= DEATHS_TO_BLAME[cause]:
                self.clear(tried)
                return tried
            return None
        for request_id in request_ids:
            num_deaths = self._num_deaths[request_id] = self._num_deaths.get(request_id, 0) + 1
            if num_deaths >= DEATHS_TO_TRY[cause]:
                self._trials.setdefault(request_id, 0)
        return None

    def clear(self, request_id: str) -> None:
        """Clear a request that got a new token or ended; it may become suspect again."""
        self._num_deaths.pop(request_id, None)
        self._trials.pop(request_id, None)
