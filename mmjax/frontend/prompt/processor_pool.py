"""The threads that process requests, and the processors that they use."""

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

from mmjax.cache.stored_items import open_stored_items
from mmjax.config.engine_config import ModelConfig
from mmjax.models.registry import create_processor
from mmjax.processing.media.decode_budget import Cancellation
from mmjax.processing.processor import BaseMultiModalProcessor, ProcessorCache
from mmjax.system.allocator import return_free_pages
from mmjax.system.loop_calls import LoopCalls

T = TypeVar("T")


class RequestThreads:
    """Runs jobs of requests; heavy ones, which decode much, never take the last thread."""

    def __init__(self, num_workers: int, calls: LoopCalls) -> None:
        """Have `num_workers` threads for light jobs, and half as many for heavy ones.

        `calls`: into the loop whose jobs they are.
        """
        self._calls = calls
        self._light = ThreadPoolExecutor(num_workers, thread_name_prefix="mmjax-process")
        self._heavy = ThreadPoolExecutor(
            max(1, num_workers // 2), thread_name_prefix="mmjax-decode"
        )

    async def run(
        self, job: Callable[[], T], cancellation: Cancellation, *, is_heavy: bool = False
    ) -> T:
        """Run `job` in a thread; RequestCancelledError if it is cancelled before it starts."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def start() -> None:
            try:
                cancellation.check()
                result = job()
            except BaseException as error:
                self._calls.call(_fail, done, error)
            else:
                self._calls.call(_finish, done, result)
            finally:
                if is_heavy:
                    return_free_pages()

        # In the request's context, for the id in its log lines.
        pool = self._heavy if is_heavy else self._light
        submitted = pool.submit(copy_context().run, start)
        submitted.add_done_callback(lambda one: one.cancelled() and self._calls.call(done.cancel))
        return await done

    def close(self) -> None:
        """Start no more jobs, without waiting for running ones."""
        self._light.shutdown(wait=False, cancel_futures=True)
        self._heavy.shutdown(wait=False, cancel_futures=True)


def _finish(done: "asyncio.Future[T]", result: T) -> None:
    if not done.cancelled():
        done.set_result(result)


def _fail(done: "asyncio.Future[T]", error: BaseException) -> None:
    if not done.cancelled():
        done.set_exception(error)


class ProcessorPool:
    """One model's processors, each used by one thread at a time: HF's are not thread-safe.

    They share one cache, and one index of encoded media.
    """

    def __init__(self, model_config: ModelConfig, cache: ProcessorCache | None) -> None:
        self._model_config = model_config
        self._cache = cache
        self._lock = threading.Lock()
        self.first = create_processor(model_config, cache=cache)
        """For metadata, and for `commit`, which uses no HF objects."""
        self.item_store = open_stored_items(model_config, self.first)
        self.first.item_store = self.item_store
        self.tokenizer = copy.deepcopy(self.first.info.get_tokenizer())
        """Used by no request, so that it can be read and copied at any time."""
        self._idle: list[BaseMultiModalProcessor[Any]] = [self.first]

    @contextmanager
    def borrow(self) -> Iterator[BaseMultiModalProcessor[Any]]:
        """Yield a processor for exclusive use; a new one if all are in use."""
        with self._lock:
            processor = self._idle.pop() if self._idle else None
        if processor is None:
            # Outside of the lock, since loading takes a second or more.
            processor = self._make()
        try:
            yield processor
        finally:
            with self._lock:
                self._idle.append(processor)

    def fill(self, num_instances: int) -> None:
        """Make processors, before any is borrowed, until there are `num_instances`.

        To copy a large tokenizer stops all threads for a quarter of a second, requests' too.
        """
        # Behind the first, which requests one after the other share with its caches.
        self._idle[:0] = [self._make() for _ in range(num_instances - len(self._idle))]

    def _make(self) -> BaseMultiModalProcessor[Any]:
        tokenizer = copy.deepcopy(self.tokenizer)
        processor = create_processor(self._model_config, tokenizer, cache=self._cache)
        processor.item_hasher = self.first.item_hasher
        processor.decode_budget = self.first.decode_budget
        processor.item_store = self.first.item_store
        return processor
