"""Decode a request's images as they arrive, while others of it are still on their way.

What is decoded counts, until it is processed, in the budget that all requests share.
"""

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from mmjax.processing.hashing.item_hashes import ItemHasher
from mmjax.processing.media.decode_budget import MAX_BATCH_BYTES, DecodeBudget
from mmjax.processing.media.encoded import EncodedImage


class DecodeAhead:
    """What all requests share: threads, the budget, and what was seen before."""

    def __init__(
        self,
        budget: DecodeBudget,
        hasher: ItemHasher,
        *,
        max_request_bytes: int,
        num_threads: int,
    ) -> None:
        """`max_request_bytes`: what one request may decode."""
        self.budget = budget
        self.hasher = hasher
        self.max_request_bytes = min(max_request_bytes, MAX_BATCH_BYTES)
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix="mmjax-ahead")

    def close(self) -> None:
        """Start nothing more."""
        self.threads.shutdown(wait=False, cancel_futures=True)


class RequestAhead:
    """The images of one request that are decoded ahead; used by one event loop."""

    def __init__(self, shared: DecodeAhead, *, is_salted: bool) -> None:
        """`is_salted`: whether the request shares no cache, so that nothing is known to it."""
        self._shared = shared
        self._is_salted = is_salted
        self._started: list[tuple[EncodedImage, Future[None]]] = []
        self._lock = threading.Lock()
        self._num_bytes = 0

    async def decode(self, image: EncodedImage) -> None:
        """Wait until an image is decoded, if it may be; RequestError where it cannot be.

        It stays encoded where the budget or the request's share of it has no room, and where its
        bytes were seen before: then a cache has it, most likely.
        """
        future = self._shared.threads.submit(self._decode, image)
        self._started.append((image, future))
        await asyncio.wrap_future(future)

    def end(self) -> None:
        """Free what is still decoded, without waiting."""
        for image, future in self._started:
            future.cancel()
            future.add_done_callback(partial(self._drop, image))

    def _decode(self, image: EncodedImage) -> None:
        if not self._is_salted and self._shared.hasher.has_named("image", image):
            return
        num_bytes = image.num_bytes_to_decode
        with self._lock:
            if self._num_bytes + num_bytes > self._shared.max_request_bytes:
                return
            self._num_bytes += num_bytes
        image.decode_ahead(self._shared.budget)

    def _drop(self, image: EncodedImage, future: Future[None]) -> None:
        # In a thread: whoever decodes the image holds its lock, and this may be the event loop.
        with suppress(RuntimeError):  # closed
            self._shared.threads.submit(image.drop_pixels)
