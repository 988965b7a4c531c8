"""The ids that a user gives items: their shape, and how they pair with the items."""

from collections.abc import Mapping, Sequence

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.processing.items import MultiModalDataItems

MultiModalUUIDDict = Mapping[str, str | Sequence[str | None] | None]
"""Per modality, one id or a list of ids, as the user gives them."""


def parse_mm_uuids(mm_uuids: MultiModalUUIDDict | None) -> dict[str, list[str | None]]:
    """Return per modality a list of uuids; entries may be None."""
    parsed: dict[str, list[str | None]] = {}
    for modality, uuids in (mm_uuids or {}).items():
        if uuids is not None:
            parsed[modality] = [uuids] if isinstance(uuids, str) else list(uuids)
    return parsed


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
        for index, uuid in enumerate(uuids):
            if uuid is not None and not isinstance(uuid, str):
                raise RequestTypeError(
                    f"multi_modal_uuids[{modality!r}][{index}] has the type "
                    f"`{type(uuid).__name__}`; a uuid is a str or None",
                    param="multi_modal_uuids",
                )
    for modality, items in mm_items.items():
        uuids = mm_uuids.get(modality)
        for index, item in enumerate(items.get_all_items_for_hash()):
            if item is None and (uuids is None or uuids[index] is None):
                raise RequestValueError(
                    f"{modality} {index} is empty but its uuid is missing; give the data or a uuid",
                    param="multi_modal_data",
                )
