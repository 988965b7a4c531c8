"""Threads that process requests: those with much to decode have their own, so none waits for them.

How much a request has to decode is known once it is hashed, when nothing is decoded yet: it is
then begun anew in the other lane. What was learned of its pictures stays with them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mmjax.allocator import return_free_pages
from mmjax.errors import MMJaxError
from mmjax.processing.media.decode_budget import MAX_BATCH_BYTES, Cancellation, DecodeControl

MAX_LIGHT_BYTES = MAX_BATCH_BYTES
"""What a request may decode among the light ones: one batch for HF's processor."""

T = TypeVar("T")


class _TooHeavyError(MMJaxError):
    """The request has more to decode than the lane takes."""


class _LightControl(DecodeControl):
    """Sends requests away that have much to decode."""

    def admit(self, num_bytes: int) -> None:
        """Raise if the request belongs to the other lane."""
        if num_bytes > MAX_LIGHT_BYTES:
            raise _TooHeavyError


class WorkLanes:
    """Two pools of threads: one for most requests, one for those with much to decode."""

    def __init__(self, num_workers: int) -> None:
        """Start `num_workers` threads for most requests, and half as many for the heavy ones."""
        self._light = ThreadPoolExecutor(num_workers, thread_name_prefix="mmjax-process")
        self._heavy = ThreadPoolExecutor(
            max(1, num_workers // 2), thread_name_prefix="mmjax-decode"
        )

    async def run(self, job: Callable[[DecodeControl], T], cancellation: Cancellation) -> T:
        """Return what `job` does in a thread; it gives its argument to `prepare`.

        RequestCancelledError where `cancellation` is set before it begins, or before it decodes.
        """

        def run_light() -> T:
            cancellation.check()
            return job(_LightControl(cancellation))

        def run_heavy() -> T:
            try:
                cancellation.check()
                return job(DecodeControl(cancellation))
            finally:
                return_free_pages()

        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._light, run_light)
        except _TooHeavyError:
            return await loop.run_in_executor(self._heavy, run_heavy)

    def close(self) -> None:
        """Start nothing more; what runs ends by itself."""
        self._light.shutdown(wait=False, cancel_futures=True)
        self._heavy.shutdown(wait=False, cancel_futures=True)
