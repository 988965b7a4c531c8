"""Threads with stacks of their own size: what compiles or reads grammars recurses deeply."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_STACK_SIZE_LOCK = threading.Lock()
"""`threading.stack_size` is one setting of the process: two that set and restored it at the same
time left each other's."""


class DeepStackPool(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` whose threads have stacks of `stack_bytes`, and no others do."""

    def __init__(self, max_workers: int, *, stack_bytes: int, thread_name_prefix: str) -> None:
        """See `ThreadPoolExecutor`; raise ValueError for a stack that the system does not give."""
        super().__init__(max_workers, thread_name_prefix)
        self._stack_bytes = stack_bytes

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run the call in a thread, which may be started here and so get its stack."""
        with _STACK_SIZE_LOCK:
            before = threading.stack_size(self._stack_bytes)
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                threading.stack_size(before)
