"""An LRU cache bounded by bytes.

Eviction is deterministic: two caches in two processes that get the same calls hold the same keys.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")


class CacheInfo(NamedTuple):
    """Hits and look-ups of a cache."""

    hits: int
    total: int

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.total if self.total else 0.0

    def __sub__(self, other: "CacheInfo") -> "CacheInfo":
        return CacheInfo(self.hits - other.hits, self.total - other.total)


class LRUCache(MutableMapping[K, V], Generic[K, V]):
    """A mapping with least-recently-used eviction by size. Not thread-safe."""

    def __init__(self, capacity: int, getsizeof: Callable[[V], int] | None = None) -> None:
        self.capacity = capacity
        self._getsizeof = getsizeof or (lambda value: 1)
        self._values: OrderedDict[K, V] = OrderedDict()
        self._sizes: dict[K, int] = {}
        self._size = 0
        self._hits = 0
        self._total = 0
        self._last_info = CacheInfo(0, 0)
        self.on_removed: Callable[[V], object] = lambda value: None
        """Called with each value that is evicted, replaced or removed."""

    @property
    def currsize(self) -> int:
        """Sum of the values' sizes."""
        return self._size

    @property
    def order(self) -> tuple[K, ...]:
        """Keys, least recently used first."""
        return tuple(self._values)

    @property
    def cache(self) -> Mapping[K, V]:
        """A read-only view; reading it changes neither order nor statistics."""
        return MappingProxyType(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[K]:
        return iter(tuple(self._values))

    def __contains__(self, key: object) -> bool:
        """Whether a key is held; changes neither order nor statistics."""
        return key in self._values

    def __getitem__(self, key: K) -> V:
        """Return a value and mark it as used; statistics stay."""
        value = self._values[key]
        self._values.move_to_end(key)
        return value

    def get(self, key: K, default: V | T = None) -> V | T:
        """Return a value and mark it as used; count a hit or a miss."""
        self._total += 1
        if key not in self._values:
            return default
        self._hits += 1
        return self[key]

    def touch(self, key: K) -> None:
        """Mark a key as used, if it is held; statistics stay."""
        if key in self._values:
            self._values.move_to_end(key)

    def fits(self, value: V) -> bool:
        """Whether a value is no larger than the capacity."""
        return self._getsizeof(value) <= self.capacity

    def __setitem__(self, key: K, value: V) -> None:
        """Store a value, evicting others until it fits; ValueError if it exceeds the capacity."""
        size = self._getsizeof(value)
        if size > self.capacity:
            raise ValueError(f"value of size {size} does not fit: the capacity is {self.capacity}")
        if key in self._values:
            del self[key]
        self.make_room(size)
        self._values[key] = value
        self._sizes[key] = size
        self._size += size

    def make_room(self, size: int) -> None:
        """Evict until a value of `size`, which is at most the capacity, fits."""
        while self._size + size > self.capacity:
            self.popitem()

    def put_if_fits(self, key: K, value: V) -> bool:
        """Store a value if it fits, and return whether it does; drop an old value in any case."""
        self.pop(key, None)
        if not self.fits(value):
            return False
        self[key] = value
        return True

    def __delitem__(self, key: K) -> None:
        value = self._values.pop(key)
        self._size -= self._sizes.pop(key)
        self.on_removed(value)

    def popitem(self) -> tuple[K, V]:
        """Evict the least recently used value; KeyError if the cache is empty."""
        if not self._values:
            raise KeyError("nothing to evict: the cache is empty")
        key, value = next(iter(self._values.items()))
        del self[key]
        return key, value

    def stat(self, *, delta: bool = False) -> CacheInfo:
        """Return hits and look-ups: all, or those since the last call with `delta`."""
        info = CacheInfo(self._hits, self._total)
        if not delta:
            return info
        last, self._last_info = self._last_info, info
        return info - last
