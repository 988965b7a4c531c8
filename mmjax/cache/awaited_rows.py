"""Encoder outputs that others compute, for requests that wait: asked for once, kept until used."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from mmjax.errors import InternalError, RequestError

Fetch = Callable[[Any], "Future[np.ndarray | None]"]
"""Returns an item's rows, `[rows, D]`; None: this engine must encode it."""


class AwaitedRows:
    """Holds rows by the items' identifiers, for the requests that asked for them."""

    def __init__(self, fetch: Fetch, *, max_requests: int) -> None:
        """`max_requests`: as many may ask at once before they run."""
        self._fetch = fetch
        self._max_requests = max_requests
        self._jobs: dict[str, Future[np.ndarray | None]] = {}
        self._wanted: dict[str, set[str]] = {}
        """request_id -> identifiers of what was asked for, and not taken since."""

    def may_ask(self, request_id: str) -> bool:
        """Return whether a request that does not run may ask: what it asks for takes memory."""
        return request_id in self._wanted or len(self._wanted) < self._max_requests

    def are_here(self, request_id: str, items: Sequence[Any]) -> bool:
        """Return whether the rows of all items are here; those that are not are asked for."""
        for item in items:
            self._wanted.setdefault(request_id, set()).add(item.identifier)
            if item.identifier not in self._jobs:
                self._jobs[item.identifier] = self._fetch(item)
        return all(_has_result(self._jobs[item.identifier]) for item in items)

    def take(self, identifier: str) -> np.ndarray | None:
        """Return rows that are here, which go to the device; None: they must be encoded."""
        rows = self._jobs.pop(identifier).result()
        for request_id, wanted in list(self._wanted.items()):
            wanted.discard(identifier)
            if not wanted:
                del self._wanted[request_id]
        return rows

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request has asked for rows that are not here."""
        return any(
            not _has_result(self._jobs[identifier])
            for identifier in self._wanted.get(request_id, ())
        )

    def find_failed(self) -> list[tuple[str, RequestError]]:
        """Return the requests whose rows nobody gives, and why."""
        failed: list[tuple[str, RequestError]] = []
        for request_id, wanted in self._wanted.items():
            for job in (self._jobs[identifier] for identifier in wanted):
                error = job.exception() if job.done() else None
                if error is not None:
                    is_told = isinstance(error, RequestError)
                    failed.append((request_id, error if is_told else InternalError("internal")))
                    break
        return failed

    @property
    def pending(self) -> list["Future[np.ndarray | None]"]:
        """What is on its way."""
        return [job for job in self._jobs.values() if not job.done()]

    def forget(self, request_id: str) -> None:
        """Drop what nobody but a request that has ended has asked for."""
        for identifier in self._wanted.pop(request_id, ()):
            if not any(identifier in wanted for wanted in self._wanted.values()):
                del self._jobs[identifier]


def _has_result(job: "Future[np.ndarray | None]") -> bool:
    return job.done() and job.exception() is None
