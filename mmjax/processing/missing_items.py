"""Which items of a request are processed anew, and how many bytes of them are decoded at a time.

What HF gets is cut into batches of so many decoded bytes: of 16 large images one is there in
full at a time. An item's tensors are the same whatever its batch holds; that is what keeping them
by their own hashes rests on as well.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from mmjax.decoders.image_file import BYTES_PER_PIXEL
from mmjax.errors import MediaIdConflictError, RequestValueError
from mmjax.processing.items.items import MultiModalDataItems
from mmjax.processing.prepared import ProcessedItem, ProcessorCache
from mmjax.processing.prompt_updates.updates import ResolvedPromptUpdate


class ItemRow(NamedTuple):
    """Where an item to be processed stands in its request, and what it is to be called."""

    modality: str
    place: int
    mm_hash: str


def list_rows(hashes_by_modality: Mapping[str, Sequence[str]]) -> list[ItemRow]:
    """Return a row for each item of a request."""
    return [
        ItemRow(modality, place, mm_hash)
        for modality, hashes in hashes_by_modality.items()
        for place, mm_hash in enumerate(hashes)
    ]


def leave_out_repeats(rows: Iterable[ItemRow]) -> list[ItemRow]:
    """Return the first row of each hash of a modality."""
    first_rows: dict[tuple[str, str], ItemRow] = {}
    for row in rows:
        first_rows.setdefault((row.modality, row.mm_hash), row)
    return list(first_rows.values())


def find_missing(
    cache: ProcessorCache, hashes_by_modality: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Sequence[ResolvedPromptUpdate]], list[ItemRow]]:
    """Return the held items' updates by hash, and the rows of the others, each hash once."""
    known: dict[str, Sequence[ResolvedPromptUpdate]] = {}
    missing: list[ItemRow] = []
    for row in list_rows(hashes_by_modality):
        updates = cache.peek_prompt_updates(row.mm_hash)
        if updates is None:
            missing.append(row)
        else:
            _check_alike(row.mm_hash, {update.modality for update in updates}, {row.modality})
            known[row.mm_hash] = updates
    return known, leave_out_repeats(missing)


def admit_items(
    rows: Iterable[ItemRow], mm_items: MultiModalDataItems, max_request_bytes: int
) -> list[int]:
    """Return how many bytes each item decodes to; refuse too many, and items without data."""
    items = [(mm_items[modality], place) for modality, place, _ in rows]
    for modality_items, place in items:
        if modality_items.get_item_for_hash(place) is None:
            raise RequestValueError(
                f"Cache miss for {modality_items.modality} at index {place} but data is not "
                "provided; send the data with its uuid again",
                param="multi_modal_data",
            )
    sizes = [modality_items.count_bytes_to_decode(place) for modality_items, place in items]
    for (modality_items, place), total in zip(items, accumulate(sizes), strict=True):
        if total > max_request_bytes:
            param = modality_items.get_param(place)
            raise RequestValueError(
                f"the media up to `{param}` take {total} bytes when they are decoded "
                f"({BYTES_PER_PIXEL} for a pixel), at most {max_request_bytes} are accepted of "
                "one request; send fewer or smaller ones, or set "
                "`--max-media-request-decode-bytes` higher",
                param=param,
            )
    return sizes


def select_rows(mm_items: MultiModalDataItems, rows: Iterable[ItemRow]) -> MultiModalDataItems:
    """Return some of a request's items; a modality of which all are wanted, as it is."""
    places: dict[str, list[int]] = {}
    for modality, place, _ in rows:
        places.setdefault(modality, []).append(place)
    return MultiModalDataItems(
        {
            modality: items if len(chosen) == len(items) else items.select(chosen)
            for modality, chosen in places.items()
            for items in [mm_items[modality]]
        }
    )


def name_items(
    rows: Sequence[ItemRow],
    processed: Mapping[str, Sequence[ProcessedItem]],
    *,
    owns_arrays: bool,
) -> dict[str, ProcessedItem]:
    """Return processed items by hash; per modality, they stand in the order of `rows`.

    With `owns_arrays` without views: an item that is kept must not keep its batch alive.
    """
    fresh: dict[str, ProcessedItem] = {}
    for modality, items in processed.items():
        own_rows = [row for row in rows if row.modality == modality]
        for row, (item, alternatives) in zip(own_rows, items, strict=True):
            kept = (item.own_arrays() if owns_arrays else item, alternatives)
            first = fresh.setdefault(row.mm_hash, kept)
            if first is not kept:
                ours, others = (
                    [(u.modality, u.content.full) for u in one[1]] for one in (kept, first)
                )
                _check_alike(row.mm_hash, others, ours)
    return fresh


def _check_alike(mm_hash: str, first: object, other: object) -> None:
    if first != other:
        # Of one content they are alike: a caller's own id stands for two.
        raise MediaIdConflictError(
            f"the id `{mm_hash}` stands for two items that differ; give each an id of its own",
            param="multi_modal_uuids",
        )
