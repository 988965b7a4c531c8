"""What P0 notes of the items that P1 holds; a note and the message that makes it true are one.

P1 gets messages in the order of the notes, and changes its cache as the notes say.
"""

import threading
from collections.abc import Callable, Collection, Sequence

import msgspec

from mmjax.cache import BaseMultiModalProcessorCache, ShmObjectStoreSenderCache
from mmjax.errors import MultiModalCacheMissError
from mmjax.frontend.engine_client.features import all_hashes, build_features, inputs_with_tensors
from mmjax.frontend.engine_client.requests import Delivery, ProcessedRequest
from mmjax.frontend.prompt.processor_pool import ProcessorPool
from mmjax.processing.prepared import PreparedInputs
from mmjax.transport.messages import EngineCoreRequest

Deliver = Callable[[Delivery], None]
"""Takes a message under the lock that orders all of them: it must not wait."""


class Ledger:
    """Completes messages with what P1 lacks. Safe to call from several threads.

    NOTE: not from an event loop: a commit holds the lock while it copies into shared memory.
    """

    def __init__(
        self, processors: ProcessorPool, cache: BaseMultiModalProcessorCache | None
    ) -> None:
        self._processors = processors
        self._cache = cache
        self._lock = threading.Lock()
        self.epoch = 0
        """Counts the P1s that were lost: a message is made for one of them."""

    def commit(
        self,
        request: ProcessedRequest,
        deliver: Deliver | None = None,
        *,
        indices: Collection[int] | None = None,
        is_inline: bool = False,
    ) -> None:
        """Complete the request's messages, and hand over each as it is complete.

        What the cache has lost since `prepare` is processed again; RequestError where an item has
        nothing to be made from.

        Args:
            request: As `prepare` made it.
            deliver: Called once for each message, in order.
            indices: Of the messages to complete; None: all.
            is_inline: Whether each message brings all of its tensors, and counts on no cache.
        """
        remaining = list(range(len(request.messages)) if indices is None else indices)
        prepared = request.prepared
        if is_inline or self._cache is None:
            prepared = self._rebuild(prepared, all_hashes(prepared))
        while remaining:
            try:
                with self._lock:
                    self._commit_next(request, remaining, prepared, deliver, is_inline=is_inline)
            except MultiModalCacheMissError as miss:
                # Every round makes more items fresh, and needs fewer from the cache.
                prepared = self._rebuild(prepared, miss.mm_hashes)
        request.prepared = prepared

    def invalidate(self, mm_hashes: Collection[str], epoch: int | None = None) -> None:
        """Learn that P1 does not hold these items; of the P1 of another `epoch`, nothing."""
        with self._lock:
            if epoch in (None, self.epoch):
                self._invalidate(mm_hashes)

    def take_back(self, message: EngineCoreRequest) -> None:
        """Learn that a message was not sent, and never will be."""
        with self._lock:
            for feature in message.mm_features:
                if isinstance(self._cache, ShmObjectStoreSenderCache) and feature.data is not None:
                    self._cache.withdraw(feature.data)
            self._invalidate([item.mm_hash or item.identifier for item in message.mm_features])

    def forget_engine(self, begin: Callable[[int], None] | None = None) -> None:
        """Learn that P1 is a new one, which holds nothing, or that there is none.

        `begin` gets the new epoch, after all deliveries of the old ones and before any of the new.
        """
        with self._lock:
            self.epoch += 1
            try:
                if self._cache is not None:
                    self._cache.reset_readers()
            finally:
                if begin is not None:
                    begin(self.epoch)

    def _commit_next(
        self,
        request: ProcessedRequest,
        remaining: list[int],
        prepared: PreparedInputs,
        deliver: Deliver | None,
        *,
        is_inline: bool,
    ) -> None:
        index = remaining[0]
        message = self._complete(request.messages[index], prepared, is_inline=is_inline)
        del remaining[0]
        request.messages[index] = message
        if deliver is not None:
            deliver(Delivery(request, index, message, self.epoch))

    def _complete(
        self, message: EngineCoreRequest, prepared: PreparedInputs, *, is_inline: bool
    ) -> EngineCoreRequest:
        if is_inline:
            self._invalidate(all_hashes(prepared))
            inputs = inputs_with_tensors(prepared)
        else:
            inputs = self._processors.first.commit(prepared)
        features = build_features(inputs, lora_name=message.lora_name)
        return msgspec.structs.replace(message, mm_features=features)

    def _invalidate(self, mm_hashes: Collection[str]) -> None:
        if self._cache is not None:
            for mm_hash in mm_hashes:
                self._cache.invalidate(mm_hash)

    def _rebuild(self, prepared: PreparedInputs, mm_hashes: Sequence[str]) -> PreparedInputs:
        missing = [mm_hash for mm_hash in mm_hashes if mm_hash not in prepared.fresh]
        if not missing:
            return prepared
        with self._processors.borrow() as processor:
            return processor.rebuild(prepared, missing)
