"""One logger format for both processes."""

import logging
import sys

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_ERASE_LINE = "\r\x1b[K"
"""On a terminal a progress bar may stand where a line is about to begin, also the other process's.
"""
_DATE_FORMAT = "%m-%d %H:%M:%S"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def configure_logging(level: str = "info", *, process: str = "") -> None:
    """Send mmjax's records to stderr; `process` (such as "P1") stands before the module's name."""
    handler = logging.StreamHandler(sys.stderr)
    label = f"{process} " if process else ""
    line = _FORMAT.replace("[", f"[{label}")
    if sys.stderr.isatty():
        line = _ERASE_LINE + line
    handler.setFormatter(logging.Formatter(line, _DATE_FORMAT))
    root = logging.getLogger("mmjax")
    root.handlers = [handler]
    root.setLevel(level.upper())
    root.propagate = False
