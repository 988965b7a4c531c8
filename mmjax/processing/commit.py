"""One request's operations on the processor cache, in the order that the engine's side repeats.

Touch every item, resolve those that are held, store the fresh ones; each in the order of the
prompt. The engine's cache does the same to the same features, so that both evict alike.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from mmjax.errors import MultiModalCacheMissError
from mmjax.processing.prepared import ProcessedItem
from mmjax.processing.prompt_updates.updates import ResolvedPromptUpdate
from mmjax.processing.tensors.inputs import ItemData


@runtime_checkable
class ProcessorCache(Protocol):
    """What a processor asks of a cache of processed items."""

    def is_cached(self, mm_hashes: Sequence[str]) -> list[bool]:
        """Return which items are held; changes neither order nor statistics."""
        ...

    def peek_prompt_updates(self, mm_hash: str) -> Sequence[ResolvedPromptUpdate] | None:
        """Return a held item's prompt updates, else None; changes neither order nor statistics."""
        ...

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Mark an item as used, so that it is evicted last."""
        ...

    def get_and_update_item(
        self, mm_item: ProcessedItem | None, mm_hash: str
    ) -> tuple[ItemData | None, Sequence[ResolvedPromptUpdate]]:
        """Return the held item, or store `mm_item`; MultiModalCacheMissError without both.

        The returned item is None where the engine's side holds the tensors.
        """
        ...

    def get_and_update(
        self, mm_items: Sequence[ProcessedItem | None], mm_hashes: Sequence[str]
    ) -> Sequence[tuple[ItemData | None, Sequence[ResolvedPromptUpdate]]]:
        """Do `commit_items` for one request, as one change that no other thread comes between."""
        ...


def commit_items(
    cache: ProcessorCache, mm_hashes: Sequence[str], fresh: Mapping[str, ProcessedItem]
) -> list[ItemData | None]:
    """Bring one request's items to the cache, and return what the engine gets of each.

    Args:
        cache: Changed only if no item is missing.
        mm_hashes: One per item, in the order of the prompt; an item may stand there twice.
        fresh: The items that were processed for this request.
    """
    counts = Counter(mm_hashes)
    is_held = dict(zip(counts, cache.is_cached(list(counts)), strict=True))
    missing = [mm_hash for mm_hash in counts if not is_held[mm_hash] and mm_hash not in fresh]
    if missing:
        raise MultiModalCacheMissError(missing)
    # First every touch: storing a fresh item must not evict one that this request needs.
    for mm_hash in mm_hashes:
        cache.touch_sender_cache_item(mm_hash)
    rows: list[ItemData | None] = [None] * len(mm_hashes)
    for row, mm_hash in enumerate(mm_hashes):
        if is_held[mm_hash]:
            rows[row], _ = cache.get_and_update_item(fresh.get(mm_hash), mm_hash)
    stored: dict[str, ItemData | None] = {}
    for row, mm_hash in enumerate(mm_hashes):
        if mm_hash in stored:
            rows[row] = stored[mm_hash]
        elif not is_held[mm_hash]:
            rows[row], _ = cache.get_and_update_item(fresh[mm_hash], mm_hash)
            stored[mm_hash] = rows[row]
            if counts[mm_hash] > 1:
                stored[mm_hash] = _repeat(cache, mm_hash, rows[row])
    return rows


def _repeat(cache: ProcessorCache, mm_hash: str, item: ItemData | None) -> ItemData | None:
    """Return what a second occurrence carries: as any hit, or the tensors if none was stored."""
    # The item is the newest already, so that this changes no order.
    (is_stored,) = cache.is_cached([mm_hash])
    return cache.get_and_update_item(None, mm_hash)[0] if is_stored else item
