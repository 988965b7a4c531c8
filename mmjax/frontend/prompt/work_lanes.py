"""Two thread pools for processing requests, so that small ones do not wait for large ones.

How much a request has to decode is known once it is hashed, before anything is decoded: a large one
is then restarted in the other pool. Its images' headers and hashes are kept.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from mmjax.errors import MMJaxError
from mmjax.processing.media.decode_budget import MAX_BATCH_BYTES, Cancellation, DecodeControl
from mmjax.system.allocator import return_free_pages

MAX_LIGHT_BYTES = MAX_BATCH_BYTES
"""Bytes that a small request may decode: one batch of HF's processor."""

T = TypeVar("T")


class _TooHeavyError(MMJaxError):
    """The request has too much to decode for this pool."""


class _LightControl(DecodeControl):
    """Refuses requests that decode more than `MAX_LIGHT_BYTES`."""

    def admit(self, num_bytes: int) -> None:
        """Raise if the request belongs to the other pool."""
        if num_bytes > MAX_LIGHT_BYTES:
            raise _TooHeavyError


class WorkLanes:
    """Two thread pools: one for small requests, one for those that decode much."""

    def __init__(self, num_workers: int) -> None:
        """Start `num_workers` threads for small requests, and half as many for large ones."""
        self._light = ThreadPoolExecutor(num_workers, thread_name_prefix="mmjax-process")
        self._heavy = ThreadPoolExecutor(
            max(1, num_workers // 2), thread_name_prefix="mmjax-decode"
        )

    async def run(self, job: Callable[[DecodeControl], T], cancellation: Cancellation) -> T:
        """Run `job` in a thread; it passes its argument to `InputProcessor.prepare`.

        RequestCancelledError if `cancellation` is set before it starts, or before it decodes.
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
            # In the request's context, for the id in its log lines.
            return await loop.run_in_executor(self._light, copy_context().run, run_light)
        except _TooHeavyError:
            return await loop.run_in_executor(self._heavy, copy_context().run, run_heavy)

    def close(self) -> None:
        """Start no more jobs, without waiting for running ones."""
        self._light.shutdown(wait=False, cancel_futures=True)
        self._heavy.shutdown(wait=False, cancel_futures=True)
