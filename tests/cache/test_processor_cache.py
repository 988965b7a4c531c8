"""The processor-only cache: hits, sizes, evictions, statistics."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mmjax.cache import (
    CacheInfo,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
    config_with_directory,
    engine_receiver_cache_from_config,
    processor_cache_from_config,
)
from mmjax.config.engine_config import MultiModalConfig
from mmjax.errors import ConfigError, MultiModalCacheMissError
from mmjax.processing import MultiModalKwargsItem, PromptReplacement
from tests.cache.logs import find_records
from tests.cache.shm_kit import feature


def item(nbytes: int):
    updates = [PromptReplacement("image", [1], [2] * 1000).resolve(0)]
    return MultiModalKwargsItem.dummy(nbytes), updates


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


def test_one_request_is_one_change():
    cache = MultiModalProcessorOnlyCache(100)
    one, two = item(10), item(10)
    with pytest.raises(MultiModalCacheMissError) as caught:
        cache.get_and_update([one, None], ["a", "b"])
    assert caught.value.mm_hashes == ["b"]
    assert not cache.is_cached_item("a")
    assert cache.get_and_update([one, None, one, two], ["a", "a", "b", "b"]) == [one] * 4
    cache.reset_readers()  # P1 holds nothing that it could lose
    assert cache.peek_prompt_updates("a") is one[1]
    assert cache.peek_prompt_updates("c") is None
    cache.close()
    cache.close()
    assert cache.is_cached(["a", "b"]) == [False, False]


# ---- which one ---------------------------------------------------------------------------------


def make(num_api_processes: int = 1, **settings: Any):
    config = MultiModalConfig(**settings)
    sender = processor_cache_from_config(config, num_api_processes=num_api_processes)
    receiver = engine_receiver_cache_from_config(
        config_with_directory(config, sender), num_api_processes=num_api_processes
    )
    for cache in (receiver, sender):
        if cache is not None:
            cache.close()
    return tuple(None if cache is None else type(cache) for cache in (sender, receiver))


MIRRORED = (MultiModalProcessorSenderCache, MultiModalReceiverCache)
SHARED = (ShmObjectStoreSenderCache, ShmObjectStoreReceiverCache)
IN_P0 = (MultiModalProcessorOnlyCache, None)


def test_the_config_decides():
    assert make() == MIRRORED
    assert make(mm_processor_cache_type="processor_only") == IN_P0
    assert make(mm_processor_cache_type="shm", mm_processor_cache_gb=2**-10) == SHARED
    assert make(mm_processor_cache_gb=0.0) == (None, None)
    assert make(mm_processor_cache_gb=0.0, mm_processor_cache_type="shm") == (None, None)


def test_p1_must_be_told_of_the_segment():
    config = MultiModalConfig(mm_processor_cache_type="shm")
    with pytest.raises(ConfigError, match="make P0's cache first"):
        engine_receiver_cache_from_config(config)


def test_the_largest_shared_item_is_what_the_config_says():
    config = MultiModalConfig(
        mm_processor_cache_type="shm",
        mm_processor_cache_gb=2**-6,
        mm_shm_cache_max_object_size_mb=1,
    )
    cache = processor_cache_from_config(config)
    assert isinstance(cache, ShmObjectStoreSenderCache)
    with contextlib.closing(cache):
        cache.get_and_update([item(2**19), item(2**20 + 1)], ["small", "large"])
        assert cache.is_cached(["small", "large"]) == [True, False]
        assert config_with_directory(config, cache).mm_shm_name == cache.name
    assert config_with_directory(config, None) is config


def test_without_room_in_shared_memory_both_halves_are_lru(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("mmjax.cache.media.selection.logger.propagate", True)
    before = sorted(Path("/dev/shm").glob(f"mmjax-{os.geteuid()}/{os.getpid()}-*"))
    monkeypatch.setattr(os, "pwrite", refuse)
    assert make(mm_processor_cache_type="shm", mm_shm_cache_max_object_size_mb=7) == MIRRORED
    assert len(find_records(caplog)) == 1
    assert "No space left on device" in caplog.text
    # What was made of it is gone.
    assert sorted(Path("/dev/shm").glob(f"mmjax-{os.geteuid()}/{os.getpid()}-*")) == before


def test_another_fault_of_shared_memory_is_the_operators():
    with pytest.raises(ConfigError, match="`mm_shm_name` is"):
        make(mm_processor_cache_type="shm", mm_shm_name="a/b")


def test_several_senders_cannot_keep_one_receivers_order():
    for kind in ("lru", "shm"):
        assert make(num_api_processes=2, mm_processor_cache_type=kind) == IN_P0
    assert make(num_api_processes=2, mm_processor_cache_gb=0.0) == (None, None)


def test_both_halves_hold_the_same_number_of_bytes():
    config = MultiModalConfig(mm_processor_cache_gb=2**-20)
    sender, receiver = (
        processor_cache_from_config(config),
        engine_receiver_cache_from_config(config),
    )
    assert isinstance(sender, MultiModalProcessorSenderCache)
    assert isinstance(receiver, MultiModalReceiverCache)
    for nbytes in (1024, 1025):
        (sent,) = sender.get_and_update([item(nbytes)], [str(nbytes)])
        receiver.get_and_update_features([feature(sent[0], str(nbytes))])
    assert sender.order == receiver.order == ("1024",)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"mm_processor_cache_gb": float("nan")}, "nan; expected a number of at least 0"),
        ({"mm_processor_cache_gb": -1.0}, "-1.0; expected a number of at least 0"),
        ({"mm_processor_cache_gb": float("inf")}, "inf; expected a number of at least 0"),
        ({"mm_shm_cache_max_object_size_mb": 64}, "64, but `mm_processor_cache_type` is 'lru'"),
        (
            {"mm_shm_cache_max_object_size_mb": 0, "mm_processor_cache_type": "shm"},
            "0; expected an integer of at least 1",
        ),
    ],
)
def test_settings_that_cannot_hold_are_refused(settings: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        MultiModalConfig(**settings)


def test_an_unknown_type_is_refused():
    config = MultiModalConfig()
    # The type checker of the tests would refuse it first.
    object.__setattr__(config, "mm_processor_cache_type", "disk")
    with pytest.raises(ConfigError, match="'disk'; expected one of lru, shm, processor_only"):
        config.__post_init__()
