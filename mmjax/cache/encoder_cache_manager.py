"""Who holds which encoder output, counted in embeddings, by identifier. Holds no arrays.

An entry is referenced (some request still needs it), freeable (kept, in case it is asked for again)
or gone. `num_freeable_slots` counts the free slots and those of the freeable entries.
"""

from collections import Counter, OrderedDict, defaultdict

from mmjax.cache.lru import CacheInfo


class EncoderCacheManager:
    """Accounts for a pool of `cache_size` embeddings that requests share by identifier."""

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.info = CacheInfo(0, 0)
        """How many of the outputs that requests needed were there."""
        self.reset()

    def reset(self) -> None:
        """Forget all entries and references."""
        self.cached: dict[str, set[str]] = {}
        """identifier -> the requests that still need it."""
        self.freeable: OrderedDict[str, int] = OrderedDict()
        """identifier -> embeddings, of entries without a reference; the oldest first."""
        self.freed: list[str] = []
        """Evicted, and not yet reported."""
        self.num_free_slots = self.cache_size
        self.num_freeable_slots = self.cache_size
        self._num_embeds: dict[str, int] = {}
        self._identifiers: defaultdict[str, set[str]] = defaultdict(set)
        self._num_found: Counter[str] = Counter()
        """request_id -> outputs found since `note_found`."""

    def check_and_update_cache(self, request_id: str, identifier: str) -> bool:
        """Return whether the output is cached; if it is, the request holds it from now on."""
        if identifier not in self.cached:
            return False
        if not self.cached[identifier]:
            self.num_freeable_slots -= self.freeable.pop(identifier)
        self._num_found[request_id] += request_id not in self.cached[identifier]
        self._refer(request_id, identifier)
        return True

    def get_num_embeds(self, identifier: str) -> int | None:
        """Return the size of a cached output, or None."""
        return self._num_embeds.get(identifier)

    def can_allocate(self, num_embeds: int, compute_budget: int, num_scheduled: int = 0) -> bool:
        """Return whether an item may be encoded now; evicts the oldest freeable entries for it.

        Args:
            num_embeds: the item's embeddings.
            compute_budget: what may still be encoded in this step.
            num_scheduled: embeddings promised in this step and not allocated yet.
        """
        if num_embeds > compute_budget:
            return False
        needed = num_embeds + num_scheduled
        if needed > self.num_freeable_slots:
            return False
        while needed > self.num_free_slots:
            identifier, freed = self.freeable.popitem(last=False)
            del self.cached[identifier], self._num_embeds[identifier]
            self.freed.append(identifier)
            self.num_free_slots += freed
        return True

    def allocate(self, request_id: str, identifier: str, num_embeds: int) -> None:
        """Give a new entry to a request; `can_allocate` said yes."""
        assert identifier not in self.cached, f"{identifier=} is cached already"
        assert num_embeds <= self.num_free_slots, f"{num_embeds=} {self.num_free_slots=}"
        self.cached[identifier] = set()
        self._num_embeds[identifier] = num_embeds
        self.num_free_slots -= num_embeds
        self.num_freeable_slots -= num_embeds
        self._refer(request_id, identifier)
        self._count(0, 1)

    def note_found(self, request_id: str) -> None:
        """Count what was found for a request: it is computed now, and not asked again."""
        num_found = self._num_found.pop(request_id, 0)
        self._count(num_found, num_found)

    def _count(self, num_hits: int, num_asked: int) -> None:
        self.info = CacheInfo(self.info.hits + num_hits, self.info.total + num_asked)

    def free_encoder_input(self, request_id: str, identifier: str) -> None:
        """Drop a request's reference; the entry stays until its slots are needed. Idempotent."""
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

    def get_cached_identifiers(self, request_id: str) -> set[str]:
        """Return what the request holds."""
        return set(self._identifiers.get(request_id, ()))

    def get_freed_mm_hashes(self) -> list[str]:
        """Return what was evicted since the last call, less what has been allocated again."""
        freed = [identifier for identifier in self.freed if identifier not in self.cached]
        self.freed = []
        return list(dict.fromkeys(freed))

    def _refer(self, request_id: str, identifier: str) -> None:
        self.cached[identifier].add(request_id)
        self._identifiers[request_id].add(identifier)
