"""The sender cache and the message that it stands for change together, under one lock.

P1 gets messages in the order of their commits, and changes its cache as each of them says.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from mmjax.cache import BaseMultiModalProcessorCache, ShmObjectStoreSenderCache
from mmjax.errors import MultiModalCacheMissError, RequestValueError
from mmjax.frontend.engine_client.requests import ProcessedRequest
from mmjax.frontend.prompt.processor_pool import ProcessorPool
from mmjax.processing.prepared import PreparedInputs
from mmjax.processing.tensors.inputs import (
    ItemData,
    MultiModalFeatureSpec,
    MultiModalInputs,
    MultiModalKwargsItems,
)
from mmjax.transport.messages import EngineCoreRequest


@dataclass(frozen=True, slots=True)
class CommittedMessage:
    """One message that is committed: it must be sent, and in this order."""

    request: ProcessedRequest
    index: int
    """Which of the request's sequences."""
    message: EngineCoreRequest
    epoch: int
    """Which P1 the message was made for: another one does not hold what it leaves out."""


OnCommit = Callable[[CommittedMessage], None]
"""Takes a message under the lock that orders all of them: it must not wait."""


class SenderCacheCommitter:
    """Adds to messages the tensors that P1 lacks, and notes them in the sender cache.

    Safe to call from several threads.

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
        on_commit: OnCommit | None = None,
        *,
        indices: Collection[int] | None = None,
        is_inline: bool = False,
    ) -> None:
        """Complete the request's messages, and hand over each as it is complete.

        What the cache has lost since `prepare` is processed again; RequestError where an item has
        nothing to be made from.

        Args:
            request: As `prepare` made it.
            on_commit: Called once for each message, in order.
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
                    self._commit_next(request, remaining, prepared, on_commit, is_inline=is_inline)
            except MultiModalCacheMissError as miss:
                # Every round makes more items fresh, and needs fewer from the cache.
                prepared = self._rebuild(prepared, miss.mm_hashes)
        request.prepared = prepared

    def invalidate(self, mm_hashes: Collection[str], epoch: int | None = None) -> None:
        """Note that P1 does not hold these items; of the P1 of another `epoch`, nothing."""
        with self._lock:
            if epoch in (None, self.epoch):
                self._invalidate(mm_hashes)

    def revert(self, message: EngineCoreRequest) -> None:
        """Undo the commit of a message that was not sent, and never will be."""
        with self._lock:
            for feature in message.mm_features:
                if isinstance(self._cache, ShmObjectStoreSenderCache) and feature.data is not None:
                    self._cache.withdraw(feature.data)
            self._invalidate([item.mm_hash or item.identifier for item in message.mm_features])

    def reset_engine(self, begin: Callable[[int], None] | None = None) -> None:
        """Note that P1 is a new one, which holds nothing, or that there is none.

        `begin` gets the new epoch, after all messages of the old ones and before any of the new.
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
        on_commit: OnCommit | None,
        *,
        is_inline: bool,
    ) -> None:
        index = remaining[0]
        message = self._complete(request.messages[index], prepared, is_inline=is_inline)
        del remaining[0]
        request.messages[index] = message
        if on_commit is not None:
            on_commit(CommittedMessage(request, index, message, self.epoch))

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


# ---- a processed prompt's items as the engine gets them -----------------------------------------


def mm_identifier(
    mm_hash: str, *, lora_name: str | None = None, enable_tower_connector_lora: bool = False
) -> str:
    """Return the name of an item's encoder output: its hash, unless an adapter changes the tower.

    `("ab", lora_name="poet", enable_tower_connector_lora=True)` -> `"poet:ab"`.
    """
    if lora_name is None or not enable_tower_connector_lora:
        return mm_hash
    return f"{lora_name}:{mm_hash}"


def build_features(
    inputs: MultiModalInputs,
    *,
    lora_name: str | None = None,
    enable_tower_connector_lora: bool = False,
) -> list[MultiModalFeatureSpec]:
    """Return the items, sorted by their place in the prompt; tensors that repeat come once."""
    _check_hashes(inputs)
    features = inputs.to_features()
    sent: dict[str, ItemData] = {}
    for feature in features:
        mm_hash = feature.mm_hash or feature.identifier
        feature.identifier = mm_identifier(
            mm_hash, lora_name=lora_name, enable_tower_connector_lora=enable_tower_connector_lora
        )
        # By identity: an address in shared memory is made anew for every reading.
        if feature.data is not None and feature.data is sent.get(mm_hash):
            feature.data = None
        elif feature.data is not None:
            sent[mm_hash] = feature.data
    return features


def all_hashes(prepared: PreparedInputs) -> list[str]:
    """Return the hashes of a prompt's items, each once."""
    return list(dict.fromkeys(h for hashes in prepared.mm_hashes.values() for h in hashes))


def inputs_with_tensors(prepared: PreparedInputs) -> MultiModalInputs:
    """Return a prompt whose items all have their tensors; all of them must be fresh."""
    return MultiModalInputs(
        prompt_token_ids=prepared.prompt_token_ids,
        encoder_prompt_token_ids=prepared.encoder_prompt_token_ids,
        mm_kwargs=MultiModalKwargsItems(
            {
                modality: [prepared.fresh[mm_hash][0] for mm_hash in mm_hashes]
                for modality, mm_hashes in prepared.mm_hashes.items()
            }
        ),
        mm_hashes=prepared.mm_hashes,
        mm_placeholders=prepared.mm_placeholders,
        prompt=prepared.prompt,
    )


def _check_hashes(inputs: MultiModalInputs) -> None:
    for modality, mm_hashes in inputs.mm_hashes.items():
        for index, mm_hash in enumerate(mm_hashes):
            if not isinstance(mm_hash, str):
                raise RequestValueError(
                    f"the hash of {modality} {index} is a {type(mm_hash).__name__}; "
                    "a hash or a uuid is a str",
                    param="multi_modal_uuids",
                )
