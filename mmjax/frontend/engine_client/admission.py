"""Which requests are admitted: room for sequences and prompt tokens, no known cause of a crash.

Knows nothing of P1.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import msgspec

from mmjax.errors import CapacityError, RequestQuarantinedError, RequestValueError
from mmjax.frontend.requests.request import ProcessedRequest

MAX_QUARANTINED = 1024
"""The oldest are forgotten first."""


class Capacity:
    """Counts unfinished requests, from before their processing on."""

    def __init__(self, max_num_seqs: int, max_num_queued_tokens: int | None = None) -> None:
        self.max_num_seqs = max_num_seqs
        """How many sequences there may be."""
        self._max_num_queued_tokens = max_num_queued_tokens
        self.num_requests = 0
        self.num_seqs = 0
        """Their sequences."""
        self._reserved_tokens: dict[object, int] = {}
        """Tokens of prompts that are processed, but not counted among those that wait yet."""
        self._tokens_lock = threading.Lock()

    def check_size(self, num_prompts: int, n: int) -> None:
        """Raise for a request that would not fit even alone."""
        limit = (
            f"this server takes {self.max_num_seqs} sequences at once (`--max-num-seqs` and "
            "`--max-num-queued-reqs`)"
        )
        if n > self.max_num_seqs:
            raise RequestValueError.about("n", f"is {n}, but {limit}; lower it")
        if num_prompts * n > self.max_num_seqs:
            held = f"holds {num_prompts} prompts with `n`={n} answers each"
            raise RequestValueError.about("prompt", f"{held}, but {limit}; send fewer together")

    def check_room(self, num_seqs: int = 1) -> None:
        """Raise CapacityError without room for so many sequences more."""
        if self.num_seqs + num_seqs > self.max_num_seqs:
            raise CapacityError(
                f"the server holds {self.num_seqs} sequences and takes {self.max_num_seqs}; "
                "try again in a moment"
            )

    def enter(self, num_seqs: int) -> None:
        """Add a request, or raise CapacityError.

        P1 never holds more than is counted here, so an admitted request has room there.
        """
        self.check_size(1, num_seqs)
        self.check_room(num_seqs)
        self.num_requests += 1
        self.num_seqs += num_seqs

    def leave(self, num_seqs: int) -> None:
        """Remove a request."""
        self.num_requests -= 1
        self.num_seqs -= num_seqs

    def reserve_tokens(
        self, num_tokens: int, count_queued: Callable[[], int]
    ) -> Callable[[], None]:
        """Reserve room for a prompt behind those that wait, or raise CapacityError. Thread-safe.

        Args:
            num_tokens: Of the prompt, for each of its sequences.
            count_queued: Returns the tokens of the prompts that wait; reserved ones are added.

        Returns:
            What gives the room back, once the prompt waits itself, or has failed. Idempotent and
            thread-safe.
        """
        limit, reservation = self._max_num_queued_tokens, object()
        # Under the lock from the look to the reservation: of two threads one is second.
        with self._tokens_lock:
            num_others = sum(self._reserved_tokens.values())
            num_others += 0 if limit is None else count_queued()
            if limit is not None and num_others and num_others + num_tokens > limit:
                raise CapacityError(
                    f"the prompt has {num_tokens} tokens, {num_others} of others wait, and the "
                    f"server takes {limit} (`--max-num-queued-tokens`); try again in a moment"
                )
            self._reserved_tokens[reservation] = num_tokens
        return partial(self._release_tokens, reservation)

    def _release_tokens(self, reservation: object) -> None:
        with self._tokens_lock:
            self._reserved_tokens.pop(reservation, None)


class Quarantine:
    """Hashes of requests, each with the time until which it is refused. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, request: ProcessedRequest) -> None:
        """Refuse the same request from now on."""
        if self._seconds:
            self._until[_hash(request)] = time.monotonic() + self._seconds
            while len(self._until) > MAX_QUARANTINED:
                self._until.popitem(last=False)

    def check(self, request: ProcessedRequest) -> None:
        """Raise RequestQuarantinedError if the request is refused."""
        if not self._until:
            return
        until = self._until.get(_hash(request))
        if until is not None and until > time.monotonic():
            raise RequestQuarantinedError


def _hash(request: ProcessedRequest) -> bytes:
    """Return a hash of prompt, media and parameters, without the seed, which may be drawn."""
    message = request.messages[0]
    content = (
        message.prompt_token_ids,
        message.encoder_prompt_token_ids,
        sorted(request.prepared.mm_hashes.items()),
        msgspec.structs.replace(message.sampling_params, seed=None),
        message.lora_name,
    )
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()
