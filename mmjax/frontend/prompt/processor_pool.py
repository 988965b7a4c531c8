"""A pool of processors for threads."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmjax.config.engine_config import ModelConfig
from mmjax.models.registry import create_processor
from mmjax.processing.processor import BaseMultiModalProcessor, ProcessorCache


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
        self.tokenizer = copy.deepcopy(self.first.info.get_tokenizer())
        """Used by no request, so that it can be read and copied at any time."""
        self._idle: list[BaseMultiModalProcessor[Any]] = [self.first]
        self.num_instances = 1

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

    def _make(self) -> BaseMultiModalProcessor[Any]:
        tokenizer = copy.deepcopy(self.tokenizer)
        processor = create_processor(self._model_config, tokenizer, cache=self._cache)
        processor.item_hasher = self.first.item_hasher
        processor.decode_budget = self.first.decode_budget
        with self._lock:
            self.num_instances += 1
        return processor
