"""Writes down which of our files run, in every process that has this folder on its path.

Python imports a module of this name at its start. `MMJAX_TRACE` is a folder: its file `is_on` has
one byte, which the test sets to 1 while its request is on its way; `calls.txt` gets a line for each
function when a process calls it first meanwhile: seconds, file, function.
"""

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[2] / "mmjax") + "/"


def record_calls(folder: Path) -> None:
    """Trace calls in all threads that start from now on, for as long as the process lives."""
    with (folder / "is_on").open("rb") as flag:
        is_on = mmap.mmap(flag.fileno(), 1, access=mmap.ACCESS_READ)
    calls = os.open(folder / "calls.txt", os.O_WRONLY | os.O_APPEND)
    seen: set[int] = set()

    def trace(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if is_on[0] and id(code) not in seen and code.co_filename.startswith(PACKAGE):
            seen.add(id(code))
            file = code.co_filename.removeprefix(PACKAGE)
            os.write(calls, f"{time.monotonic()} {file} {code.co_name}\n".encode())

    threading.settrace(trace)
    sys.settrace(trace)


if folder := os.environ.get("MMJAX_TRACE"):
    record_calls(Path(folder))
