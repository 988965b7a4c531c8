"""Logging of both processes and of uvicorn, in one format, with bounded records."""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, TypeAlias

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]

MAX_SILENCE_S = 2.5
"""Longest silence of a start: three seconds without a line look like a fault."""

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_ERASE_LINE = "\r\x1b[K"
"""Erases a progress bar, possibly the other process's, at the beginning of a line on a terminal."""
_DATE_FORMAT = "%m-%d %H:%M:%S"

_MAX_MESSAGE_CHARS = 4000
_MAX_TRACEBACK_CHARS = 20_000

REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
"""Id of the current request, in every log line meanwhile."""

_CONTROL_CHARACTERS = {
    code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
}
"""What a client sent cannot begin a line of its own, nor control a terminal."""

_ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def configure_logging(
    level: str = "info", *, process: str = "", log_format: LogFormat = "text"
) -> None:
    """Log mmjax's records to stderr; `process` (such as "P1") precedes the module's name."""
    _send_to_stderr("mmjax", process, log_format).setLevel(level.upper())
    # Its warnings would be lines of another format: of a prompt that is too long, for instance,
    # which mmjax refuses itself. Read by the first import; the level is for a later call.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def configure_http_logging(*, process: str = "", log_format: LogFormat = "text") -> None:
    """Log uvicorn's records in the same format, at uvicorn's level."""
    _send_to_stderr("uvicorn", process, log_format)


@contextmanager
def reporting(
    logger: logging.Logger, describe: Callable[[], str], *, interval_s: float = MAX_SILENCE_S
) -> Iterator[None]:
    """Until the block ends, log what goes on whenever `logger` was silent for `interval_s`."""
    silence = Silence(logger, describe, interval_s=interval_s)
    is_over = threading.Event()
    thread = threading.Thread(
        target=silence.report_until, args=(is_over.wait,), name="report", daemon=True
    )
    logger.addFilter(silence.note)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        logger.removeFilter(silence.note)


class Silence:
    """Whether a logger was silent for too long, and what it then says."""

    def __init__(
        self,
        logger: logging.Logger,
        describe: Callable[[], str],
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._describe = describe
        self._interval_s = interval_s
        self._clock = clock
        self._start = self._last = clock()

    def note(self, record: logging.LogRecord) -> bool:
        """Note that something was said; a filter that lets all pass."""
        self._last = self._clock()
        return True

    def report_until(self, wait: Callable[[float], bool]) -> None:
        """Say what goes on after each interval; `wait` waits, and returns whether it is over."""
        while not wait(self._last + self._interval_s - self._clock()):
            now = self._clock()
            if now - self._last >= self._interval_s:
                self._last = now  # also where the logger's level hides it from `note`
                self._logger.info("%s; %.0f s so far", self._describe(), now - self._start)


def _send_to_stderr(name: str, process: str, log_format: LogFormat) -> logging.Logger:
    handler = logging.StreamHandler(sys.stderr)
    label = f"{process} " if process else ""
    line = _FORMAT.replace("[", f"[{label}")
    if sys.stderr.isatty():
        line = _ERASE_LINE + line
    is_json = log_format == "json"
    handler.setFormatter(
        _JsonFormatter(process) if is_json else _BoundedFormatter(line, _DATE_FORMAT)
    )
    logger = logging.getLogger(name)
    logger.handlers = [handler]
    logger.propagate = False
    return logger


class _BoundedFormatter(logging.Formatter):
    """Truncates long records: an exception's message may contain a client's whole body."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _one_line(record.message)
        if request_id := REQUEST_ID.get():
            record.message += f" (request {_one_line(request_id)})"
        return super().formatMessage(record)

    def formatException(self, ei: _ExcInfo) -> str:
        lines = super().formatException(ei).split("\n")
        return cut("\n".join(cut(line, _MAX_MESSAGE_CHARS) for line in lines), _MAX_TRACEBACK_CHARS)


class _JsonFormatter(_BoundedFormatter):
    """Writes a record as one JSON object."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": _one_line(record.getMessage()),
        }
        if request_id := REQUEST_ID.get():
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _one_line(text: str) -> str:
    return cut(text.rstrip("\n"), _MAX_MESSAGE_CHARS).translate(_CONTROL_CHARACTERS)


def cut(text: str, max_chars: int) -> str:
    """Return `text`, its middle elided if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} [{len(text) - 2 * half} more characters] {text[-half:]}"
