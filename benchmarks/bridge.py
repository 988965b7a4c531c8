"""What crosses from P0 to P1: shared memory beside memcpy, the bytes of a repeated item."""

import statistics
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np

from mmjax.cache import (
    MultiModalProcessorSenderCache,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
)
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from mmjax.processing.tensors.inputs import ItemData
from mmjax.transport.codec import decode, encode
from mmjax.transport.messages import EngineCoreRequest

_OBJECT_BYTES = 64 * 2**20


def measure_shm(repeats: int) -> Iterator[str]:
    """Send fresh items of 64 MB to another process by shared memory, and copy as much."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    sender = ShmObjectStoreSenderCache(5 * _OBJECT_BYTES)
    reader = context.Process(target=_read, args=(sender.name, theirs), daemon=True)
    reader.start()
    source = np.random.default_rng(0).integers(0, 256, _OBJECT_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    item = _item("pixel_values", source[None])
    trips, copies = [], []
    try:
        for number in range(repeats + 8):  # the first find nothing loaded
            start = time.perf_counter()
            sent, _ = sender.get_and_update_item((item, []), str(number))
            ours.send_bytes(b"".join(_framed(sent, str(number))))
            assert ours.recv_bytes() == bytes([source[-1]])
            trips.append(time.perf_counter() - start)
            start = time.perf_counter()
            np.copyto(target, source)
            copies.append(time.perf_counter() - start)
        ours.send_bytes(b"")
        reader.join()
    finally:
        sender.close()
    trip, copy = (statistics.median(times[8:]) for times in (trips, copies))
    rate, share = _OBJECT_BYTES / trip / 1e9, copy / trip
    yield f"shm round trip of 64 MB: {rate:.2f} GB/s, {share:.2f}x memcpy's bandwidth"


def measure_bridge() -> Iterator[str]:
    """Send a request with a picture of 896x896 twice; count the bytes of both messages."""
    cache = MultiModalProcessorSenderCache(2**30)
    item = _item("pixel_values", np.zeros((1, 3, 896, 896), np.uint8))
    sizes = []
    for processed in ((item, []), None):
        sent, _ = cache.get_and_update_item(processed, "a" * 64)
        sizes.append(sum(len(frame) for frame in encode(_request(sent, "a" * 64))))
    first, again = sizes
    yield (
        f"bytes on the bridge, 896x896: first {first}, again {again}, "
        f"{again / first:.3%} (ceiling 1%)"
    )


def _item(key: str, data: np.ndarray) -> MultiModalKwargsItem:
    config = {key: MultiModalFieldConfig.batched("image")}
    (item,) = MultiModalKwargsItems.from_hf_inputs({key: data}, config)["image"]
    assert item is not None
    return item


def _request(data: ItemData | None, mm_hash: str) -> EngineCoreRequest:
    feature = MultiModalFeatureSpec(
        data=data,
        modality="image",
        identifier=mm_hash,
        mm_position=PlaceholderRange(4, 256),
        mm_hash=mm_hash,
    )
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[2] * 300,
        mm_features=[feature],
        sampling_params=SamplingParams(),
    )


def _framed(data: ItemData | None, mm_hash: str) -> Iterator[bytes]:
    for frame in encode(_request(data, mm_hash)):
        yield len(frame).to_bytes(8, "little") + bytes(frame)


def _read(name: str, pipe: Connection) -> None:
    """Play P1: attach, take each item in, answer with its last byte, let go."""
    receiver = ShmObjectStoreReceiverCache(name)
    while message := pipe.recv_bytes():
        frames, start = [], 0
        while start < len(message):
            stop = start + 8 + int.from_bytes(message[start : start + 8], "little")
            frames.append(message[start + 8 : stop])
            start = stop
        request = decode(frames)
        assert isinstance(request, EngineCoreRequest)
        (feature,) = receiver.get_and_update_features(request.mm_features)
        assert isinstance(feature.data, MultiModalKwargsItem)
        last = bytes([feature.data["pixel_values"].data[-1]])
        del request, feature
        pipe.send_bytes(last)
    receiver.close()
