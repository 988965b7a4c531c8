"""Commits messages to P1: each changes the sender cache under the lock that orders all of them.

P1 receives messages in the order of their commits, and repeats each change in its receiver cache.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from mmjax.cache import BaseMultiModalProcessorCache
from mmjax.errors import MultiModalCacheMissError, RequestValueError
from mmjax.frontend.prompt.processor_pool import ProcessorPool
from mmjax.frontend.requests.request import ProcessedRequest
from mmjax.processing.prepared import PreparedInputs
from mmjax.processing.tensors.inputs import (
    ItemData,
    MultiModalFeatureSpec,
    MultiModalInputs,
)
from mmjax.transport.messages import EngineCoreRequest


@dataclass(frozen=True, slots=True)
class CommittedMessage:
    """A committed message: it must be sent, in the order of the commits."""

    request: ProcessedRequest
    index: int
    """Index of the request's sequence."""
    message: EngineCoreRequest
    epoch: int
    """Epoch of the P1 that the message is for: another P1 lacks the tensors that it omits."""


OnCommit = Callable[[CommittedMessage], None]
"""Called with a message, under the lock of all commits: it must not block."""


class SenderCacheCommitter:
    """Adds the tensors that P1 lacks to messages, and records them in the sender cache.

    Thread-safe. NOTE: blocks, so not for an event loop: a commit may copy into shared memory.
    """

    def __init__(
        self,
        processors: ProcessorPool,
        cache: BaseMultiModalProcessorCache | None,
        *,
        enable_tower_connector_lora: bool = False,
    ) -> None:
        """`enable_tower_connector_lora`: whether adapters change what towers compute."""
        self._enable_tower_connector_lora = enable_tower_connector_lora
        self._processors = processors
        self._cache = cache
        self._lock = threading.Lock()
        self.epoch = 0
        """Number of P1s that have ended; every message is for one epoch."""

    def commit(
        self,
        request: ProcessedRequest,
        on_commit: OnCommit | None = None,
        *,
        indices: Iterable[int] | None = None,
        is_inline: bool = False,
    ) -> None:
        """Complete and commit the request's messages.

        Items evicted since `prepare` are processed again; RequestError for one without data.

        Args:
            request: From `prepare`.
            on_commit: Called once for each message, in order.
            indices: Of the messages to commit; None: all.
            is_inline: Whether each message contains all of its tensors, and uses no cache.
        """
        prepared = request.prepared
        if is_inline or self._cache is None:
            prepared = self._rebuild(prepared, all_hashes(prepared))
        remaining = deque(range(len(request.messages)) if indices is None else indices)
        while remaining:
            try:
                self._commit_one(request, remaining[0], prepared, on_commit, is_inline=is_inline)
                remaining.popleft()
            except MultiModalCacheMissError as miss:
                # Terminates: every iteration processes more of the items itself.
                prepared = self._rebuild(prepared, miss.mm_hashes)
        request.prepared = prepared

    def invalidate(self, mm_hashes: Collection[str], epoch: int) -> None:
        """Remove items that P1 lacks from the sender cache, unless `epoch` has ended."""
        with self._lock:
            if epoch == self.epoch:
                self._invalidate(mm_hashes)

    def revert(self, message: EngineCoreRequest) -> None:
        """Undo the commit of a message that will not be sent."""
        with self._lock:
            self._invalidate([item.mm_hash or item.identifier for item in message.mm_features])

    def reset_engine(self) -> None:
        """Start an epoch, after P1 has ended or a new one, which holds nothing, has started."""
        with self._lock:
            self.epoch += 1
            if self._cache is not None:
                self._cache.reset_readers()

    def _commit_one(
        self,
        request: ProcessedRequest,
        index: int,
        prepared: PreparedInputs,
        on_commit: OnCommit | None,
        *,
        is_inline: bool,
    ) -> None:
        with self._lock:
            if is_inline:
                self._invalidate(all_hashes(prepared))
                inputs = prepared.to_inputs()
            else:
                inputs = self._processors.first.commit(prepared)
            message = request.messages[index]
            features = build_features(
                inputs,
                lora_name=message.lora_name,
                enable_tower_connector_lora=self._enable_tower_connector_lora,
            )
            message = msgspec.structs.replace(message, mm_features=features)
            request.messages[index] = message
            if on_commit is not None:
                on_commit(CommittedMessage(request, index, message, self.epoch))

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


# ---- features of a processed prompt -------------------------------------------------------------


def build_features(
    inputs: MultiModalInputs,
    *,
    lora_name: str | None = None,
    enable_tower_connector_lora: bool = False,
) -> list[MultiModalFeatureSpec]:
    """Return the items' features, sorted by offset; repeated tensors are in the first one only."""
    _check_hashes(inputs)
    features = inputs.to_features()
    # An adapter changes what its tower makes of an item, and so the name of the encoder's output.
    prefix = f"{lora_name}:" if lora_name is not None and enable_tower_connector_lora else ""
    sent: dict[str, ItemData] = {}
    for feature in features:
        mm_hash = feature.mm_hash or feature.identifier
        feature.identifier = f"{prefix}{mm_hash}"
        # By identity: every handle in shared memory is another.
        if feature.data is not None and feature.data is sent.get(mm_hash):
            feature.data = None
        elif feature.data is not None:
            sent[mm_hash] = feature.data
    return features


def all_hashes(prepared: PreparedInputs) -> list[str]:
    """Return the distinct hashes of a prompt's items."""
    return list(dict.fromkeys(h for hashes in prepared.mm_hashes.values() for h in hashes))


def _check_hashes(inputs: MultiModalInputs) -> None:
    for modality, mm_hashes in inputs.mm_hashes.items():
        for index, mm_hash in enumerate(mm_hashes):
            if not isinstance(mm_hash, str):
                raise RequestValueError(
                    f"the hash of {modality} {index} is a {type(mm_hash).__name__}; "
                    "a hash or a uuid is a str",
                    param="multi_modal_uuids",
                )
