"""The processor-only cache: hits, sizes, evictions, statistics."""

import numpy as np
import pytest

from mmjax.cache import (
    CacheInfo,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    processor_cache_from_config,
)
from mmjax.cache.processor_cache import get_item_size
from mmjax.config import MultiModalConfig
from mmjax.errors import MultiModalCacheMissError
from mmjax.processing import MultiModalKwargsItem, ProcessorCache, PromptReplacement


def item(nbytes: int):
    updates = [PromptReplacement("image", [1], [2] * 1000).resolve(0)]
    return MultiModalKwargsItem.dummy(nbytes), updates


def test_it_is_what_a_processor_asks_for():
    assert isinstance(MultiModalProcessorOnlyCache(1), ProcessorCache)


def test_a_hit_returns_what_was_stored():
    cache = MultiModalProcessorOnlyCache(100)
    first = item(10)
    assert cache.get_and_update_item(first, "a") is first
    assert cache.get_and_update_item(None, "a") is first
    assert cache.get_and_update_item(item(10), "a") is first
    assert cache.get_and_update([None, first], ["a", "b"]) == [first, first]
    assert cache.is_cached(["a", "x", "b"]) == [True, False, True]
    assert cache.make_stats() == CacheInfo(3, 5)
    with pytest.raises(MultiModalCacheMissError, match="x") as caught:
        cache.get_and_update_item(None, "x")
    assert caught.value.mm_hashes == ["x"]
    assert cache.make_stats(delta=True) == CacheInfo(3, 6)


def test_the_least_recently_used_item_goes_first():
    cache = MultiModalProcessorOnlyCache(25)
    cache.get_and_update([item(10), item(10)], ["a", "b"])
    cache.is_cached(["a"])  # looking does not count as use
    cache.touch_sender_cache_item("a")
    cache.touch_sender_cache_item("unknown")
    cache.get_and_update_item(item(10), "c")
    assert cache.is_cached(["a", "b", "c"]) == [True, False, True]
    cache.invalidate("a")
    cache.invalidate("a")
    assert not cache.is_cached_item("a")
    cache.clear_cache()
    assert not cache.is_cached_item("c")


def test_an_oversize_item_is_served_and_not_kept(caplog: pytest.LogCaptureFixture):
    cache = MultiModalProcessorOnlyCache(25)
    kept, large = item(20), item(26)
    cache.get_and_update_item(kept, "a")
    for _ in range(2):
        assert cache.get_and_update_item(large, "b") is large
    assert cache.is_cached(["a", "b"]) == [True, False]
    assert caplog.text.count("is not cached") == 1


def test_tensors_are_what_weighs():
    one, _ = item(10)
    assert get_item_size(one) == 10
    assert get_item_size({"a": [np.zeros(2, np.float32)], "b": (one,)}) == 18
    assert get_item_size(1) > 0


def test_the_config_decides():
    assert processor_cache_from_config(MultiModalConfig(mm_processor_cache_gb=0.0)) is None
    for kind, expected in (
        ("processor_only", MultiModalProcessorOnlyCache),
        ("lru", MultiModalProcessorSenderCache),
    ):
        config = MultiModalConfig(mm_processor_cache_gb=0.5, mm_processor_cache_type=kind)
        assert type(processor_cache_from_config(config)) is expected
