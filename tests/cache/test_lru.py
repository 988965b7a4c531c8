"""The byte-budgeted LRU, against a list that does the same slowly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.cache.media.lru import CacheInfo, LRUCache

keys = st.sampled_from("abcdef")
operations = st.lists(
    st.one_of(
        st.tuples(st.just("set"), keys, st.integers(0, 12)),
        st.tuples(st.sampled_from(["get", "touch", "in", "pop", "read"]), keys, st.just(0)),
    ),
    max_size=60,
)


def run(cache: LRUCache[str, int], operation: tuple[str, str, int]) -> object:
    verb, key, value = operation
    match verb:
        case "set":
            if cache.fits(value):
                cache[key] = value
            return None
        case "get":
            return cache.get(key)
        case "touch":
            return cache.touch(key)
        case "in":
            return key in cache
        case "read":
            return cache.cache.get(key)
        case _:
            return cache.pop(key, None)


class SlowLRU:
    """Pairs in a list, the oldest first; values are their own sizes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pairs: list[tuple[str, int]] = []

    def run(self, operation: tuple[str, str, int]) -> object:
        verb, key, value = operation
        held = dict(self.pairs)
        if verb == "in":
            return key in held
        if verb == "read":
            return held.get(key)
        if verb == "set" and value > self.capacity:
            return None
        self.pairs = [pair for pair in self.pairs if pair[0] != key]
        if verb == "set":
            while sum(size for _, size in self.pairs) + value > self.capacity:
                self.pairs.pop(0)
            self.pairs.append((key, value))
        elif verb != "pop" and key in held:
            self.pairs.append((key, held[key]))
        return held.get(key) if verb in ("get", "pop") else None


@settings(max_examples=300, deadline=None)
@given(operations)
def test_it_holds_what_a_slow_one_holds(steps: list[tuple[str, str, int]]):
    cache: LRUCache[str, int] = LRUCache(20, getsizeof=lambda value: value)
    twin: LRUCache[str, int] = LRUCache(20, getsizeof=lambda value: value)
    slow = SlowLRU(20)
    for step in steps:
        assert run(cache, step) == slow.run(step)
        run(twin, step)
        assert cache.order == tuple(key for key, _ in slow.pairs)
        assert dict(cache.cache) == dict(slow.pairs)
        assert cache.currsize == sum(dict(slow.pairs).values()) <= 20
    assert twin.order == cache.order  # the same calls, the same evictions


def test_questions_are_counted_and_looking_is_not():
    cache: LRUCache[str, int] = LRUCache(2)
    cache["a"] = 1
    assert "a" in cache
    cache.touch("a")
    cache.touch("zzz")
    assert cache["a"] == 1
    assert cache.stat() == CacheInfo(0, 0)
    assert cache.stat().hit_ratio == 0.0
    assert cache.get("a") == 1
    assert cache.get("b", 7) == 7
    assert cache.stat(delta=True) == CacheInfo(1, 2)
    assert cache.get("a") == 1
    assert cache.stat(delta=True) == CacheInfo(1, 1)
    assert cache.stat() == CacheInfo(2, 3)
    assert cache.stat().hit_ratio == 2 / 3


def test_an_empty_cache_has_nothing_to_evict():
    cache: LRUCache[str, int] = LRUCache(10, getsizeof=lambda value: value)
    cache["a"] = 4
    cache.clear()
    assert (len(cache), list(cache), cache.currsize) == (0, [], 0)
    with pytest.raises(KeyError, match="nothing to evict"):
        cache.popitem()


def test_what_does_not_fit_is_refused_and_nothing_is_lost():
    cache: LRUCache[str, int] = LRUCache(3, getsizeof=lambda value: value)
    cache["a"] = 3
    assert not cache.fits(4)
    with pytest.raises(ValueError, match="size 4 does not fit"):
        cache["a"] = 4
    assert cache.cache == {"a": 3}


def test_a_replacement_drops_the_old_value_even_if_it_does_not_fit():
    cache: LRUCache[str, int] = LRUCache(3, getsizeof=lambda value: value)
    assert cache.put_if_fits("a", 1)
    assert cache.put_if_fits("b", 1)
    assert cache.put_if_fits("a", 2)
    assert cache.order == ("b", "a")
    assert cache.put_if_fits("c", 3)
    assert cache.order == ("c",)
    assert not cache.put_if_fits("b", 4)
    assert cache.order == ("c",)
    assert not cache.put_if_fits("c", 4)
    assert (cache.order, cache.currsize, cache.stat()) == ((), 0, CacheInfo(0, 0))
