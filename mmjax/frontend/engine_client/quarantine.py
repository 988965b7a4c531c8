"""Requests that ended P1, by what they are: the same one is refused for a while.

Knows nothing of P1.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from mmjax.errors import RequestQuarantinedError
from mmjax.frontend.engine_client.requests import ProcessedRequest

MAX_ENTRIES = 1024
"""The oldest are forgotten first."""


class Quarantine:
    """Hashes of requests, each with the time until which it is refused. Thread-safe."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, request: ProcessedRequest) -> None:
        """Refuse the same request from now on."""
        if self._seconds:
            self._until[_hash(request)] = self._clock() + self._seconds
            while len(self._until) > MAX_ENTRIES:
                self._until.popitem(last=False)

    def check(self, request: ProcessedRequest) -> None:
        """Raise RequestQuarantinedError if the request is refused."""
        if not self._until:
            return
        until = self._until.get(_hash(request))
        if until is not None and until > self._clock():
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
