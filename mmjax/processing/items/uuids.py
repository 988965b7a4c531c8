"""The ids that a user gives items: their shape, and how they pair with the items."""

from collections.abc import Mapping, Sequence
from typing import Any

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.processing.items.items import MultiModalDataItems

MultiModalUUIDDict = Mapping[str, Any]
"""Per modality, a str or a list with a str or None for each item, as the user gives it."""


class ParsedUUIDs(dict[str, list[str | None]]):
    """Per modality, a list with a str or None for each item: what `parse_mm_uuids` has checked."""


def parse_mm_uuids(mm_uuids: MultiModalUUIDDict | None) -> ParsedUUIDs:
    """Return the uuids in one form; those that have it are returned as they are."""
    if isinstance(mm_uuids, ParsedUUIDs):
        return mm_uuids
    return ParsedUUIDs(
        {
            modality: _to_list(modality, uuids)
            for modality, uuids in (mm_uuids or {}).items()
            if uuids is not None
        }
    )


def _to_list(modality: str, uuids: Any) -> list[str | None]:
    if isinstance(uuids, str):
        return [uuids]
    if isinstance(uuids, bytes | bytearray) or not isinstance(uuids, Sequence):
        raise RequestTypeError(
            f"multi_modal_uuids[{modality!r}] has the type `{type(uuids).__name__}`; "
            "give a str, or a list with a str or None for each item",
            param="multi_modal_uuids",
        )
    for index, uuid in enumerate(uuids):
        if uuid is not None and not isinstance(uuid, str):
            raise RequestTypeError(
                f"multi_modal_uuids[{modality!r}][{index}] has the type "
                f"`{type(uuid).__name__}`; a uuid is a str or None",
                param="multi_modal_uuids",
            )
    return list(uuids)


def complete_mm_data(
    mm_data: Mapping[str, Any], mm_uuids: MultiModalUUIDDict | None
) -> dict[str, Any]:
    """Return `mm_data` with an empty item for each uuid of a modality that has no data.

    `{"image": None}` with the uuids `["a", "b"]` -> `{"image": [None, None]}`; without uuids it is
    refused.
    """
    uuids = parse_mm_uuids(mm_uuids)
    completed = dict(mm_data)
    for modality, data in mm_data.items():
        if data is not None:
            continue
        if modality not in uuids:
            raise RequestValueError(
                f"multi_modal_data[{modality!r}] is empty but multi_modal_uuids[{modality!r}] is "
                "missing; give the data, or the uuids of cached items",
                param="multi_modal_data",
            )
        completed[modality] = [None] * len(uuids[modality])
    return completed


def validate_mm_uuids(
    mm_items: MultiModalDataItems, mm_uuids: Mapping[str, Sequence[str | None]]
) -> None:
    """Check that every item has data or a uuid, and that the two lists are equally long."""
    for modality, uuids in mm_uuids.items():
        if modality not in mm_items:
            raise RequestValueError(
                f"multi_modal_uuids has `{modality}`, but multi_modal_data has none; "
                f"give [None] * {len(uuids)} there for cached items",
                param="multi_modal_uuids",
            )
        if len(uuids) != mm_items.get_count(modality):
            raise RequestValueError(
                f"multi_modal_uuids[{modality!r}] must have same length as "
                f"multi_modal_data[{modality!r}]: {len(uuids)} uuids for "
                f"{mm_items.get_count(modality)} items",
                param="multi_modal_uuids",
            )
    for modality, items in mm_items.items():
        uuids = mm_uuids.get(modality) or [None] * len(items)
        for index, uuid in enumerate(uuids):
            if uuid is None and items.get_item_for_hash(index) is None:
                raise RequestValueError(
                    f"multi_modal_data[{modality!r}][{index}] is empty but its uuid, "
                    f"multi_modal_uuids[{modality!r}][{index}], is missing; "
                    "give the data or a uuid",
                    param="multi_modal_data",
                )
