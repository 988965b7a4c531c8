"""Grammars of requests, read in a process that a bad one may crash, fill or keep busy."""

import threading
from functools import partial

import msgspec

from mmjax.cache.media.lru import LRUCache
from mmjax.decoders.worker_pool import WorkerError, WorkerPool
from mmjax.errors import InternalError, RequestValueError
from mmjax.params.sampling_params import StructuredOutputsParams
from mmjax.params.structured_outputs import MAX_BYTES, ReadGrammar

CPU_SECONDS = 2.0
"""What one grammar may take; a schema of 2,000 properties takes 0.1 s."""
MAX_SECONDS = 60.0
"""What one grammar may take, however busy the machine is."""
CACHE_CHARS = 2**22
"""Grammars, and what they were made from, that are kept."""


class GrammarReader:
    """Makes grammars, and refuses bad ones: RequestValueError. Thread-safe."""

    def __init__(self, *, cpu_seconds: float = CPU_SECONDS) -> None:
        """Start nothing: the process starts with the first grammar."""
        self._new_workers = partial(
            WorkerPool,
            *("grammar", 1),
            timeout_s=MAX_SECONDS,
            memory_bytes=MAX_BYTES,
            cpu_seconds=cpu_seconds,
        )
        self._workers = self._new_workers()
        self._lock = threading.Lock()
        self._known: LRUCache[bytes, ReadGrammar] = LRUCache(CACHE_CHARS, getsizeof=_count_chars)

    def read(self, params: StructuredOutputsParams) -> str:
        """Return the grammar for the engine process."""
        key = msgspec.json.encode(params)
        with self._lock:
            answer = self._known.get(key)
        if answer is None:
            answer = self._ask(key)
            with self._lock:
                self._known[key] = answer
        if answer.error:
            raise RequestValueError.about(
                f"structured_outputs.{params.kind}", f"cannot be used: {answer.error}; mend it"
            )
        return answer.grammar

    def close(self) -> None:
        """End the process; a later grammar starts another."""
        ended, self._workers = self._workers, self._new_workers()
        ended.close()

    def _ask(self, key: bytes) -> ReadGrammar:
        try:
            answer = self._workers.run_text("grammar", key)
        except WorkerError as error:
            if error.reason == "start":
                raise InternalError("the process that reads grammars did not start") from None
            return ReadGrammar(error="it is too large or too deep, or takes too long to read")
        return msgspec.json.decode(answer, type=ReadGrammar)


def _count_chars(answer: ReadGrammar) -> int:
    # Refused ones are kept too: they are the slow ones.
    return 1024 + len(answer.grammar) + len(answer.error)
