"""The two halves of the mirrored cache, each alone, over the wire, and with real threads."""

import queue
import random
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mmjax.cache import (
    CacheInfo,
    MultiModalCacheMissError,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
)
from mmjax.cache.media.processor_cache import get_item_size
from mmjax.processing import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    ProcessorCache,
    PromptReplacement,
)
from mmjax.processing.tensors.fields import MultiModalBatchedField
from tests.cache.shm_kit import feature, over_the_bridge

pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")


def processed(nbytes: int, token: int = 2):
    updates = [PromptReplacement("image", [1], [token]).resolve(0)]
    return MultiModalKwargsItem.dummy(nbytes), updates


def item_of(data: Any) -> MultiModalKwargsItem:
    return MultiModalKwargsItem({"x": MultiModalFieldElem(data, MultiModalBatchedField())})


# ---- P0 ----------------------------------------------------------------------------------------


def test_a_hit_sends_nothing_but_the_updates():
    cache = MultiModalProcessorSenderCache(100)
    assert isinstance(cache, ProcessorCache)  # as all are, by their base class
    first = processed(10)
    assert cache.get_and_update_item(first, "a") == first
    assert cache.get_and_update_item(None, "a") == (None, first[1])
    assert cache.get_and_update_item(processed(10), "a") == (None, first[1])
    assert cache.peek_prompt_updates("a") is first[1]
    assert cache.peek_prompt_updates("b") is None
    with pytest.raises(MultiModalCacheMissError) as caught:
        cache.get_and_update_item(None, "b")
    assert caught.value.mm_hashes == ["b"]
    assert cache.make_stats() == CacheInfo(2, 4)
    assert cache.make_stats(delta=True) == CacheInfo(2, 4)
    assert cache.make_stats(delta=True) == CacheInfo(0, 0)
    assert cache.currsize == 10


def test_looking_changes_nothing():
    cache = MultiModalProcessorSenderCache(100)
    cache.get_and_update([processed(10), processed(10)], ["a", "b"])
    before = cache.order, cache.make_stats()
    assert cache.is_cached(["a", "c"]) == [True, False]
    cache.peek_prompt_updates("a")
    assert (cache.order, cache.make_stats()) == before == (("a", "b"), CacheInfo(0, 2))
    cache.touch_sender_cache_item("a")
    cache.touch_sender_cache_item("c")
    assert cache.order == ("b", "a")
    cache.invalidate("a")
    cache.invalidate("a")
    assert cache.order == ("b",)
    cache.get_and_update_item(processed(10), "c")
    cache.reset_readers()
    assert (cache.order, cache.currsize) == ((), 0)
    cache.get_and_update_item(processed(10), "d")
    cache.close()
    cache.close()
    assert (cache.order, cache.currsize) == ((), 0)


def test_one_request_is_one_change():
    cache = MultiModalProcessorSenderCache(100)
    cache.get_and_update([processed(10, 7), processed(10, 8)], ["a", "b"])
    before = cache.order, cache.make_stats()
    with pytest.raises(MultiModalCacheMissError) as caught:
        cache.get_and_update([processed(10), None, None, None, None], ["c", "d", "b", "e", "d"])
    assert caught.value.mm_hashes == ["d", "e"]
    assert (cache.order, cache.make_stats()) == before

    large = processed(200, 9)
    sent = cache.get_and_update(
        [None, processed(10, 6), None, large, None, large],
        ["b", "c", "c", "large", "a", "large"],
    )
    assert cache.order == ("b", "a", "c")  # what was held, in order; then what came
    assert [updates[0].content.full for _, updates in sent] == [[8], [6], [6], [9], [7], [9]]
    sizes = [None if item is None else get_item_size(item) for item, _ in sent]
    assert sizes[:5] == [None, 10, None, 200, None]


# ---- P1 ----------------------------------------------------------------------------------------


def test_it_fills_in_what_it_holds():
    cache = MultiModalReceiverCache(100)
    a, b = MultiModalKwargsItem.dummy(10), MultiModalKwargsItem.dummy(20)
    features = [feature(a, "a"), feature(b, None, "b")]
    assert cache.get_and_update_features(features) == features
    # Adapters share the tensors: the key is the hash, where there is one.
    again = [feature(None, "b"), feature(None, "a", "adapter:a"), feature(None, None)]
    resolved = cache.get_and_update_features(again)
    assert [one.data for one in resolved] == [b, a, a]
    assert resolved[0] is again[0]
    assert (cache.order, cache.currsize) == (("b", "a"), 30)


def test_what_comes_replaces_what_is_held():
    cache = MultiModalReceiverCache(100)
    old, new = MultiModalKwargsItem.dummy(10), MultiModalKwargsItem.dummy(30)
    cache.get_and_update_features([feature(old, "a"), feature(old, "b")])
    (resolved,) = cache.get_and_update_features([feature(new, "a")])
    assert resolved.data is new
    assert (cache.order, cache.currsize) == (("b", "a"), 40)
    assert cache.get_and_update_features([feature(None, "a")])[0].data is new


def test_an_oversize_item_is_served_and_drops_the_old_one(caplog: pytest.LogCaptureFixture):
    cache = MultiModalReceiverCache(100)
    cache.get_and_update_features([feature(MultiModalKwargsItem.dummy(10), "a")])
    large = MultiModalKwargsItem.dummy(101)
    for _ in range(2):
        features = [feature(large, "a"), feature(None, "a")]
        assert [one.data for one in cache.get_and_update_features(features)] == [large, large]
        assert cache.order == ()
    assert caplog.text.count("is not cached") == 1


def test_every_miss_is_named_once_and_the_rest_is_kept():
    cache = MultiModalReceiverCache(100)
    cache.get_and_update_features([feature(MultiModalKwargsItem.dummy(10), "held")])
    new = MultiModalKwargsItem.dummy(20)
    features = [feature(None, key) for key in ("y", "held", "x", "y", "new")]
    features.append(feature(new, "new"))
    with pytest.raises(MultiModalCacheMissError) as caught:
        cache.get_and_update_features(features)
    assert caught.value.mm_hashes == ["y", "x"]
    assert [one.mm_hash for one in features if one.data is None] == ["y", "x", "y"]
    assert features[4].data is new  # from the later one of the same request
    assert cache.order == ("held", "new")
    cache.clear_cache()
    with pytest.raises(MultiModalCacheMissError):
        cache.get_and_update_features([feature(None, "held")])


# ---- sizes, on both sides of the bridge --------------------------------------------------------

DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64")
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)
leaves = st.one_of(
    arrays,
    arrays.filter(lambda array: array.ndim == 3).map(lambda array: array.transpose(2, 0, 1)[::2]),
    arrays.map(lambda array: np.broadcast_to(array, (3, *array.shape))),
    hnp.array_shapes(min_dims=0).map(lambda shape: np.ones(shape, ml_dtypes.bfloat16)),
    st.sampled_from([np.float32(1), np.int16(1), np.bool_(True)]),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
)
data = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner), st.tuples(inner, inner)), max_leaves=6
)


@settings(deadline=None)
@given(data)
def test_an_item_weighs_the_same_on_both_sides(value: Any):
    item = item_of(value)
    received = over_the_bridge(item)
    assert get_item_size(received) == get_item_size(item)
    assert get_item_size(over_the_bridge(received)) == get_item_size(item)


def test_an_absent_tensor_weighs_nothing():
    item = item_of(None)
    assert get_item_size(item) == get_item_size(over_the_bridge(item)) == 0


def test_weights_are_those_of_tensors_alone():
    image = {"pixels": np.zeros((3, 2), ml_dtypes.bfloat16), "grid": [1, np.zeros(2, np.int32)]}
    assert get_item_size(image) == 12 + 8 + 8
    assert get_item_size((True, 1.0, 2**63)) == 1 + 8 + 8
    assert get_item_size(np.broadcast_to(np.zeros(1, np.uint8), 1000)) == 1000


# ---- together ----------------------------------------------------------------------------------


def test_threads_that_commit_in_the_order_of_sending_never_miss():
    sender, receiver = MultiModalProcessorSenderCache(100), MultiModalReceiverCache(100)
    sizes = {f"h{index}": size for index, size in enumerate([1, 5, 9, 20, 20, 40, 90, 101])}
    bridge: queue.SimpleQueue[list[MultiModalFeatureSpec] | None] = queue.SimpleQueue()
    lock = threading.Lock()

    def commit(hashes: list[str]) -> bool:
        fresh = {h: processed(sizes[h]) for h in hashes if not sender.is_cached_item(h)}
        with lock:
            try:
                sent = sender.get_and_update([fresh.get(h) for h in hashes], hashes)
            except MultiModalCacheMissError:
                return False  # evicted since we looked
            bridge.put([feature(item, h) for h, (item, _) in zip(hashes, sent, strict=True)])
        return True

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            hashes = rng.choices(list(sizes), k=rng.randint(1, 4))
            while not commit(hashes):
                pass

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    num_served = 0
    while num_served < 600:
        features = bridge.get(timeout=60)
        assert features is not None
        for resolved in receiver.get_and_update_features(features):
            assert get_item_size(resolved.data) == sizes[resolved.mm_hash or ""]
        num_served += 1
    for thread in threads:
        thread.join()
    assert sender.order == receiver.order
    assert sender.currsize == receiver.currsize
    assert sender.make_stats().hits > 0
