"""Commits messages to P1: each changes the sender cache under the lock that orders all of them.

P1 receives messages in the order of their commits, and repeats each change in its receiver cache.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from mmjax.cache import BaseMultiModalProcessorCache
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
        indices: Collection[int] | None = None,
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
        remaining = list(range(len(request.messages)) if indices is None else indices)
        prepared = request.prepared
        if is_inline or self._cache is None:
            prepared = self._rebuild(prepared, all_hashes(prepared))
        while remaining:
            try:
                with self._lock:
                    self._commit_next(request, remaining, prepared, on_commit, is_inline=is_inline)
            except MultiModalCacheMissError as miss:
                # Terminates: every iteration processes more of the items itself.
                prepared = self._rebuild(prepared, miss.mm_hashes)
        request.prepared = prepared

    def invalidate(self, mm_hashes: Collection[str], epoch: int | None = None) -> None:
        """Remove items that P1 lacks from the sender cache, unless `epoch` has ended."""
        with self._lock:
            if epoch in (None, self.epoch):
                self._invalidate(mm_hashes)

    def revert(self, message: EngineCoreRequest) -> None:
        """Undo the commit of a message that will not be sent."""
        with self._lock:
            self._invalidate([item.mm_hash or item.identifier for item in message.mm_features])

    def reset_engine(self, begin: Callable[[int], None] | None = None) -> None:
        """Start an epoch, after P1 has ended or a new one, which holds nothing, has started.

        `begin` is called with it, between the commits of the old epoch and those of the new one.
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
        features = build_features(
            inputs,
            lora_name=message.lora_name,
            enable_tower_connector_lora=self._enable_tower_connector_lora,
        )
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


# ---- features of a processed prompt -------------------------------------------------------------


def mm_identifier(
    mm_hash: str, *, lora_name: str | None = None, enable_tower_connector_lora: bool = False
) -> str:
    """Return the identifier of an item's encoder output: its hash, with an adapter of the tower.

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
    """Return the items' features, sorted by offset; repeated tensors are in the first one only."""
    _check_hashes(inputs)
    features = inputs.to_features()
    sent: dict[str, ItemData] = {}
    for feature in features:
        mm_hash = feature.mm_hash or feature.identifier
        feature.identifier = mm_identifier(
            mm_hash, lora_name=lora_name, enable_tower_connector_lora=enable_tower_connector_lora
        )
        # By identity: every handle in shared memory is another.
        if feature.data is not None and feature.data is sent.get(mm_hash):
            feature.data = None
        elif feature.data is not None:
            sent[mm_hash] = feature.data
    return features


def all_hashes(prepared: PreparedInputs) -> list[str]:
    """Return the distinct hashes of a prompt's items."""
    return list(dict.fromkeys(h for hashes in prepared.mm_hashes.values() for h in hashes))


def inputs_with_tensors(prepared: PreparedInputs) -> MultiModalInputs:
    """Return a prompt with the tensors of all its items, all of which must be in `fresh`."""
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
