"""Threads for conversations that bring their own chat template: they wait for its process.

Apart from the threads of all other requests, which a slow template would hold.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mmjax.errors import CapacityError

T = TypeVar("T")

_NUM_THREADS = 2
MAX_WAITING = 16


class TemplateThreads:
    """Renders a few at a time, and refuses more than a few that wait."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mmjax-template")
        self._num_waiting = 0

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` in a thread; CapacityError if too many wait."""
        if self._num_waiting >= MAX_WAITING:
            raise CapacityError(
                f"{MAX_WAITING} requests wait for their own chat templates; try again in a moment",
                param="chat_template",
            )
        self._num_waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, job)
        # Also if the caller is cancelled meanwhile: the thread is busy until the job is done.
        future.add_done_callback(self._leave)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Start no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _leave(self, future: "asyncio.Future[T]") -> None:
        self._num_waiting -= 1
        if not future.cancelled():
            # Read here, as nobody else does once the caller has left.
            future.exception()
