"""Calls from threads into an event loop: many of them wake it once."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context


class LoopCalls:
    """Calls functions in an event loop, in the order in which threads ask for it.

    To wake a loop is a system call, for which the thread lets go of the GIL: what is asked for
    while the loop has yet to look costs no other one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Context, Callable[..., object], tuple[object, ...]]] = deque()
        self._is_due = False
        """Whether the loop has yet to look."""

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function, in this thread's context. Thread-safe; nothing, once the loop is closed.

        Its exception goes where those of `call_soon` go.
        """
        self._calls.append((copy_context(), function, args))
        if self._is_due:
            return
        self._is_due = True
        try:
            self._loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _run(self) -> None:
        # Before it counts them: what is added later has a turn of its own.
        self._is_due = False
        for _ in range(len(self._calls)):
            context, function, args = self._calls.popleft()
            try:
                context.run(function, *args)
            except Exception as error:
                self._loop.call_exception_handler(
                    {"message": f"a call of {function!r} failed", "exception": error}
                )
