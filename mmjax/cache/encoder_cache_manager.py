"""Allocation of the encoder cache, in embeddings, by identifier. Holds no arrays.

An entry is referenced (some request still needs it), freeable (kept for later requests until its
slots are needed) or evicted. `num_freeable_slots` counts free slots and those of freeable entries.
"""

from collections import Counter, OrderedDict, defaultdict

from mmjax.cache.media.lru import CacheInfo


class EncoderCacheManager:
    """Allocates a pool of `cache_size` embeddings, which requests share by identifier."""

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.info = CacheInfo(0, 0)
        """Outputs that requests needed: found in the cache, and in all."""
        self.reset()

    def reset(self) -> None:
        """Forget all entries and references."""
        self.cached: dict[str, set[str]] = {}
        """identifier -> ids of the requests that reference it."""
        self.freeable: OrderedDict[str, int] = OrderedDict()
        """identifier -> number of embeddings, of unreferenced entries; the oldest first."""
        self.freed: list[str] = []
        """Identifiers evicted since `get_freed_mm_hashes`."""
        self.num_free_slots = self.cache_size
        self.num_freeable_slots = self.cache_size
        self._num_embeds: dict[str, int] = {}
        self._identifiers: defaultdict[str, set[str]] = defaultdict(set)
        self._num_found: Counter[str] = Counter()
        """request_id -> outputs found since `note_found`."""

    @property
    def usage(self) -> float:
        """The referenced share of the cache, between 0 and 1."""
        return 1.0 - self.num_freeable_slots / self.cache_size

    def check_and_update_cache(self, request_id: str, identifier: str) -> bool:
        """Return whether the output is cached; if it is, add a reference of the request."""
        if identifier not in self.cached:
            return False
        if not self.cached[identifier]:
            self.num_freeable_slots -= self.freeable.pop(identifier)
        self._num_found[request_id] += request_id not in self.cached[identifier]
        self._refer(request_id, identifier)
        return True

    def get_num_embeds(self, identifier: str) -> int | None:
        """Return the number of embeddings of a cached output, or None."""
        return self._num_embeds.get(identifier)

    def can_allocate(self, num_embeds: int, compute_budget: int, num_scheduled: int = 0) -> bool:
        """Return whether an item may be encoded now; evict the oldest freeable entries for it.

        Args:
            num_embeds: Of the item.
            compute_budget: Embeddings that this step may still encode.
            num_scheduled: Embeddings already planned for this step, and not allocated yet.
        """
        if num_embeds > compute_budget:
            return False
        needed = num_embeds + num_scheduled
        if needed > self.num_freeable_slots:
            return False
        while needed > self.num_free_slots:
            self.discard(next(iter(self.freeable)))
        return True

    def discard(self, identifier: str) -> None:
        """Evict an entry; one that is referenced, or unknown, stays as it is."""
        num_embeds = self.freeable.pop(identifier, None)
        if num_embeds is None:
            return
        del self.cached[identifier], self._num_embeds[identifier]
        self.freed.append(identifier)
        self.num_free_slots += num_embeds

    def allocate(self, request_id: str, identifier: str, num_embeds: int) -> None:
        """Add an entry, referenced by the request, after `can_allocate` returned True."""
        assert identifier not in self.cached, f"{identifier=} is cached already"
        assert num_embeds <= self.num_free_slots, f"{num_embeds=} {self.num_free_slots=}"
        self.cached[identifier] = set()
        self._num_embeds[identifier] = num_embeds
        self.num_free_slots -= num_embeds
        self.num_freeable_slots -= num_embeds
        self._refer(request_id, identifier)
        self._count(0, 1)

    def note_found(self, request_id: str) -> None:
        """Add a scheduled request's hits to `info`."""
        num_found = self._num_found.pop(request_id, 0)
        self._count(num_found, num_found)

    def _count(self, num_hits: int, num_asked: int) -> None:
        self.info = CacheInfo(self.info.hits + num_hits, self.info.total + num_asked)

    def free_encoder_input(self, request_id: str, identifier: str) -> None:
        """Drop a request's reference; the entry is kept until its slots are needed. Idempotent."""
        holders = self.cached.get(identifier)
        if holders is None or request_id not in holders:
            return
        holders.remove(request_id)
        identifiers = self._identifiers[request_id]
        identifiers.remove(identifier)
        if not identifiers:
            del self._identifiers[request_id]
        if not holders:
            num_embeds = self._num_embeds[identifier]
            self.freeable[identifier] = num_embeds
            self.num_freeable_slots += num_embeds

    def free(self, request_id: str) -> None:
        """Drop all references of a request."""
        self._num_found.pop(request_id, None)
        for identifier in sorted(self._identifiers.get(request_id, ())):
            self.free_encoder_input(request_id, identifier)

    def get_freed_mm_hashes(self) -> list[str]:
        """Return what was evicted since the last call and has not been allocated again."""
        freed = [identifier for identifier in self.freed if identifier not in self.cached]
        self.freed = []
        return list(dict.fromkeys(freed))

    def _refer(self, request_id: str, identifier: str) -> None:
        self.cached[identifier].add(request_id)
        self._identifiers[request_id].add(identifier)
