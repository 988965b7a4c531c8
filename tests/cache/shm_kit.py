"""Items, features and handles for the tests of processor caches."""

import mmap
from pathlib import Path

import numpy as np

from mmjax.cache.media.shared_cache import ShmObjectStoreReceiverCache, ShmObjectStoreSenderCache
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
    PromptReplacement,
)
from mmjax.processing.tensors.fields import MultiModalBatchedField
from mmjax.processing.tensors.inputs import ItemData, SharedItem
from mmjax.transport.codec import decode, encode
from mmjax.transport.messages import EngineCoreRequest

UPDATES = [PromptReplacement("image", [1], [2]).resolve(0)]
PAGE = mmap.PAGESIZE


def make_item(num_bytes: int = PAGE, value: int = 7) -> MultiModalKwargsItem:
    data = np.full(num_bytes, value, np.uint8)
    return MultiModalKwargsItem({"x": MultiModalFieldElem(data, MultiModalBatchedField())})


def put(sender: ShmObjectStoreSenderCache, mm_hash: str, **kwargs: int) -> ItemData:
    item, updates = sender.get_and_update_item((make_item(**kwargs), UPDATES), mm_hash)
    assert updates is UPDATES
    assert item is not None
    return item


def feature(
    data: ItemData | None, mm_hash: str | None = "a", identifier: str = "a"
) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=data,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=0, length=1),
        mm_hash=mm_hash,
    )


def read(receiver: ShmObjectStoreReceiverCache, item: ItemData | None) -> MultiModalKwargsItem:
    """Read an item under its own hash."""
    mm_hash = item.mm_hash if isinstance(item, SharedItem) else "a"
    (resolved,) = receiver.get_and_update_features([feature(item, mm_hash)])
    assert resolved.tensors is not None
    return resolved.tensors


def num_mapped(directory: Path) -> int:
    """Return how many items this process has mapped, also of files that are unlinked."""
    return Path("/proc/self/maps").read_text().count(f" {directory}/")


def over_the_bridge(item: ItemData) -> ItemData:
    message = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        mm_features=[feature(item)],
        sampling_params=SamplingParams(),
    )
    decoded = decode([bytes(frame) for frame in encode(message)])
    assert isinstance(decoded, EngineCoreRequest)
    data = decoded.mm_features[0].data
    assert data is not None
    return data
