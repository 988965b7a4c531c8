"""Admission control of P0: by sequences, before any work is done, and by the prompts' tokens."""

import threading
from collections.abc import Callable

from mmjax.errors import CapacityError, RequestValueError


class Capacity:
    """Counts the requests that are being processed; its caller counts those after that."""

    def __init__(self, max_num_seqs: int, max_num_queued_tokens: int | None = None) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_queued_tokens = max_num_queued_tokens
        self.num_requests = 0
        """Requests that are being processed."""
        self.num_seqs = 0
        """Their sequences."""
        self._num_reserved_tokens = 0
        """Of prompts that are processed, and not counted among those that wait yet."""
        self._tokens_lock = threading.Lock()

    def check_size(self, num_prompts: int, n: int) -> None:
        """Raise for a request that would not fit even alone."""
        limit = (
            f"this server takes {self._max_num_seqs} sequences at once (`--max-num-seqs` and "
            "`--max-num-queued-reqs`)"
        )
        if n > self._max_num_seqs:
            raise RequestValueError(f"`n` is {n}, but {limit}; lower it", param="n")
        if num_prompts * n > self._max_num_seqs:
            raise RequestValueError(
                f"`prompt` holds {num_prompts} prompts with `n`={n} answers each, but {limit}; "
                "send fewer together",
                param="prompt",
            )

    def check_room(self, num_seqs: int, *, num_others: int) -> None:
        """Raise CapacityError without room; `num_others`: sequences past processing."""
        num_held = self.num_seqs + num_others
        if num_held + num_seqs > self._max_num_seqs:
            raise CapacityError(
                f"the server holds {num_held} sequences and takes {self._max_num_seqs}; "
                "try again in a moment"
            )

    def enter(self, num_seqs: int, *, num_others: int) -> None:
        """Add a request, or raise CapacityError; `num_others`: sequences past processing.

        P1 never holds more than is counted here, so an admitted request has room there.
        """
        self.check_size(1, num_seqs)
        self.check_room(num_seqs, num_others=num_others)
        self.num_requests += 1
        self.num_seqs += num_seqs

    def reserve_tokens(
        self, num_tokens: int, count_queued: Callable[[], int]
    ) -> "TokenReservation":
        """Reserve room for a prompt behind those that wait, or raise CapacityError. Thread-safe.

        Args:
            num_tokens: Of the prompt, for each of its sequences.
            count_queued: Returns the tokens of the prompts that wait; reserved ones are added.
        """
        limit = self._max_num_queued_tokens
        # Under the lock from the look to the reservation: of two threads one is second.
        with self._tokens_lock:
            num_others = self._num_reserved_tokens + (0 if limit is None else count_queued())
            if limit is not None and num_others and num_others + num_tokens > limit:
                raise CapacityError(
                    f"the prompt has {num_tokens} tokens, {num_others} of others wait, and the "
                    f"server takes {limit} (`--max-num-queued-tokens`); try again in a moment"
                )
            self._num_reserved_tokens += num_tokens
        return TokenReservation(self._release_tokens, num_tokens)

    def _release_tokens(self, num_tokens: int) -> None:
        with self._tokens_lock:
            self._num_reserved_tokens -= num_tokens

    def leave(self, num_seqs: int) -> None:
        """Remove a request."""
        self.num_requests -= 1
        self.num_seqs -= num_seqs


class TokenReservation:
    """Room for one prompt, until it is released: it then waits itself, or has failed."""

    def __init__(self, release: Callable[[int], None], num_tokens: int) -> None:
        self._release = release
        self._num_tokens = num_tokens
        self._lock = threading.Lock()

    def release(self) -> None:
        """Give the room back. Idempotent and thread-safe."""
        with self._lock:
            num_tokens, self._num_tokens = self._num_tokens, 0
        if num_tokens:
            self._release(num_tokens)
