"""Work on several images side by side: Pillow's decoders and filters let other threads run."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return what a function makes of each item, in order; what the first to fail raises."""
    listed = list(items)
    num_threads = min(len(listed), os.cpu_count() or 1)
    if num_threads < 2:
        return [function(item) for item in listed]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="mmjax-image") as pool:
        return list(pool.map(function, listed))
