"""Writes down which of our files run, in every process that has this folder on its path.

Python imports a module of this name at its start. `MMJAX_TRACE` is a folder: its file `is_on` has
one byte, which the test sets to 1 while its request is on its way; `calls.txt` gets a line for each
function when a process calls it first meanwhile, and one when it is first given the picture:
seconds, file, function, and 1 if it has the picture.
"""

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).parents[2] / "mmjax") + "/"
MIN_BYTES = 20_000
"""Of the picture, whatever becomes of it; nothing else of the request is as large."""
MAX_STEPS = 5
"""From a function's argument to the picture in it; what is further away is in others' hands."""


def has_picture(value: Any, steps: int) -> bool:
    """Return whether a value is the picture's text, bytes, pixels or tensors, or holds them."""
    kind = type(value)
    if kind in (str, bytes, bytearray):
        return len(value) >= MIN_BYTES
    if kind is memoryview or kind.__module__ == "numpy":
        return getattr(value, "nbytes", 0) >= MIN_BYTES
    if kind.__module__.startswith("PIL."):
        return True
    return steps > 0 and any(has_picture(one, steps - 1) for one in list_parts(value))


def list_parts(value: Any) -> Iterable[Any]:
    """Return what a container or an object of ours holds itself."""
    kind = type(value)
    if kind in (list, tuple):
        return value[:16]
    if kind is dict:
        return list(value.values())[:32]
    if not kind.__module__.startswith("mmjax."):
        return ()
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    names = [*getattr(value, "__dict__", ()), *slots, *getattr(kind, "__struct_fields__", ())]
    return [getattr(value, name, None) for name in names]


def record_calls(folder: Path) -> None:
    """Trace calls in all threads that start from now on, for as long as the process lives."""
    with (folder / "is_on").open("rb") as flag:
        is_on = mmap.mmap(flag.fileno(), 1, access=mmap.ACCESS_READ)
    calls = os.open(folder / "calls.txt", os.O_WRONLY | os.O_APPEND)
    seen: set[tuple[int, bool]] = set()

    def trace(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if not is_on[0] or not code.co_filename.startswith(PACKAGE) or (id(code), True) in seen:
            return
        given = frame.f_locals.items()
        has = any(has_picture(one, 1 if name == "self" else MAX_STEPS) for name, one in given)
        if (id(code), has) in seen:
            return
        seen.add((id(code), has))
        file = code.co_filename.removeprefix(PACKAGE)
        os.write(calls, f"{time.monotonic()} {file} {code.co_name} {has:d}\n".encode())

    threading.settrace(trace)
    sys.settrace(trace)


if folder := os.environ.get("MMJAX_TRACE"):
    record_calls(Path(folder))
