"""Grammars of requests, read in a process that a bad one may crash, fill or keep busy."""

import subprocess
import sys
import threading

import msgspec

from mmjax.cache.lru import LRUCache
from mmjax.errors import InternalError, RequestValueError
from mmjax.requests.sampling_params import StructuredOutputsParams
from mmjax.requests.structured_outputs import ReadGrammar
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

CPU_SECONDS = 2.0
"""Of one grammar; a schema of 2,000 properties takes 0.1 s."""
MAX_SECONDS = 60.0
"""Of one grammar, however busy the machine is."""
CACHE_CHARS = 2**22
"""Grammars, and what they were made from, that are kept."""


class GrammarReader:
    """Makes grammars, and refuses bad ones: RequestValueError. Thread-safe."""

    def __init__(self, *, cpu_seconds: float = CPU_SECONDS) -> None:
        """Start nothing: the process starts with the first grammar."""
        self._cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        """Apart, so that what is known is found while another grammar is read."""
        self._known: LRUCache[bytes, ReadGrammar] = LRUCache(CACHE_CHARS, getsizeof=_count_chars)

    def read(self, params: StructuredOutputsParams) -> str:
        """Return the grammar for P1."""
        key = msgspec.json.encode(params)
        answer = self._find(key)
        if answer is None:
            with self._asking:
                answer = self._find(key) or self._ask(key)
            with self._lock:
                self._known[key] = answer
        if answer.error:
            raise RequestValueError(
                f"`structured_outputs.{params.kind}` cannot be used: {answer.error}; mend it",
                param=f"structured_outputs.{params.kind}",
            )
        return answer.grammar

    def _find(self, key: bytes) -> ReadGrammar | None:
        with self._lock:
            return self._known.get(key)

    def close(self) -> None:
        """End the process; a later grammar starts it again."""
        if (process := self._process) is not None:
            process.kill()  # whoever waits for its answer stops waiting
        with self._asking:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, key: bytes) -> ReadGrammar:
        """Ask the process; one that dies of a grammar is started again for the next."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        guard = threading.Timer(MAX_SECONDS, process.kill)
        guard.start()
        try:
            process.stdin.write(key.decode() + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            guard.cancel()
        if not line:
            self._end()
            logger.info("a grammar ended the process that read it, and is refused")
            return ReadGrammar(error="it is too large or too deep, or takes too long to read")
        return msgspec.json.decode(line, type=ReadGrammar)

    def _start(self) -> "subprocess.Popen[str]":
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "mmjax.requests.structured_outputs", str(self._cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        assert process.stdout is not None
        if not process.stdout.readline():
            self._end()
            raise InternalError("the process that reads grammars did not start")
        return process


def _count_chars(answer: ReadGrammar) -> int:
    # Refused ones are kept too: they are the slow ones.
    return 1024 + len(answer.grammar) + len(answer.error)
