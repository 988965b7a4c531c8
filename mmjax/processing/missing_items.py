"""Which items of a request are processed anew, and how many bytes of them are decoded at a time.

What HF gets is cut into batches of so many decoded bytes: of 16 large images one is there in
full at a time. An item's tensors are the same whatever its batch holds; that is what keeping them
by their own hashes rests on as well.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from mmjax.decoders.image_file import BYTES_PER_PIXEL
from mmjax.errors import MediaIdConflictError, RequestValueError
from mmjax.processing.commit import ProcessorCache
from mmjax.processing.items.items import MultiModalDataItems
from mmjax.processing.media.decode_budget import DecodeBudget, split_by_bytes
from mmjax.processing.prepared import ProcessedItem
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


def find_missing(
    cache: ProcessorCache | None, hashes_by_modality: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Sequence[ResolvedPromptUpdate]], list[ItemRow]]:
    """Return the held items' updates by hash, and the rows of the others."""
    known: dict[str, Sequence[ResolvedPromptUpdate]] = {}
    missing: list[ItemRow] = []
    for modality, hashes in hashes_by_modality.items():
        are_held = [False] * len(hashes) if cache is None else cache.is_cached(hashes)
        for row, is_held in zip(list_rows({modality: hashes}), are_held, strict=True):
            updates = cache.peek_prompt_updates(row.mm_hash) if cache and is_held else None
            if updates is None:
                missing.append(row)
            else:
                _check_alike(row.mm_hash, {update.modality for update in updates}, {modality})
                known[row.mm_hash] = updates
    return known, missing


def process_in_batches(
    rows: Iterable[ItemRow],
    mm_items: MultiModalDataItems,
    process: Callable[[MultiModalDataItems], Mapping[str, Sequence[ProcessedItem]]],
    *,
    budget: DecodeBudget,
    max_request_bytes: int,
) -> dict[str, ProcessedItem]:
    """Process items, each hash of a modality once, and forget each batch's pixels.

    Whether the request may have all of them is settled before the first is decoded.

    Args:
        rows: Which of `mm_items`.
        mm_items: All items of the request.
        process: Makes tensors and prompt updates of some of them, in their order.
        budget: Held while a batch is decoded.
        max_request_bytes: What all of them may decode to.

    Returns:
        The processed items by hash.
    """
    first_rows: dict[tuple[str, str], ItemRow] = {}
    for row in rows:
        first_rows.setdefault((row.modality, row.mm_hash), row)
    sizes = admit_items(first_rows.values(), mm_items, max_request_bytes)
    cancellation = mm_items.cancellation
    fresh: dict[str, ProcessedItem] = {}
    for batch, num_bytes in split_by_bytes(zip(first_rows.values(), sizes, strict=True)):
        cancellation.check()
        with budget.hold(num_bytes, cancellation, on_wait=mm_items.drop_decoded):
            selected = _select(mm_items, batch)
            fresh |= name_items(batch, process(selected), owns_arrays=True)
            selected.drop_decoded()
    return fresh


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


def _select(mm_items: MultiModalDataItems, rows: Iterable[ItemRow]) -> MultiModalDataItems:
    places: dict[str, list[int]] = {}
    for modality, place, _ in rows:
        places.setdefault(modality, []).append(place)
    return MultiModalDataItems({m: mm_items[m].select(indices) for m, indices in places.items()})


def _check_alike(mm_hash: str, first: object, other: object) -> None:
    if first != other:
        # Of one content they are alike: a caller's own id stands for two.
        raise MediaIdConflictError(
            f"the id `{mm_hash}` stands for two items that differ; give each an id of its own",
            param="multi_modal_uuids",
        )
