"""An item's tensors as msgpack, whose bytes are elsewhere: frames of a message, shared memory."""

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from mmjax.errors import MMJaxError
from mmjax.processing.tensors.fields import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
    NestedTensors,
)
from mmjax.processing.tensors.inputs import MultiModalKwargsItem

DTYPES: Mapping[str, np.dtype] = {
    **{
        name: np.dtype(name)
        for name in (
            *("bool", "int8", "int16", "int32", "int64"),
            *("uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64"),
        )
    },
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes of arrays, in native byte order."""


class WireError(MMJaxError):
    """A value without a wire form, or malformed data."""


class WireArray(msgspec.Struct, tag="array", frozen=True, forbid_unknown_fields=True):
    """An array whose bytes are elsewhere."""

    dtype: str
    shape: list[int]
    place: int
    """The number of its frame, or its offset in shared memory."""


_Field = MultiModalBatchedField | MultiModalFlatField | MultiModalSharedField


class _WireElem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    data: WireArray | list[Any] | None
    """An array, or lists of them."""
    field: _Field


def pack_item(
    item: MultiModalKwargsItem, place: Callable[[np.ndarray], WireArray]
) -> dict[str, _WireElem]:
    """Return what msgspec encodes of an item; `place` puts an array's bytes where they go."""

    def pack_elem(elem: MultiModalFieldElem) -> _WireElem:
        if not isinstance(elem.field, _Field):
            raise WireError(f"a {type(elem.field).__name__} has no wire form")
        return _WireElem(_pack(elem.data, place), elem.field)

    return {key: pack_elem(elem) for key, elem in item.items()}


def unpack_item(wire: Any, read: Callable[[WireArray], np.ndarray]) -> MultiModalKwargsItem:
    """Return an item of what msgspec decoded; `msgspec.ValidationError` where it is none."""
    elems = msgspec.convert(wire, dict[str, _WireElem])
    return MultiModalKwargsItem(
        {
            key: MultiModalFieldElem(_unpack(elem.data, read), elem.field)
            for key, elem in elems.items()
        }
    )


# Not within the others: a closure that calls itself is a cycle, which keeps the arrays that `place`
# and `read` hold until the garbage collector comes by.


def _pack(data: NestedTensors, place: Callable[[np.ndarray], WireArray]) -> Any:
    if data is None:
        return None
    if isinstance(data, list | tuple):
        return [_pack(part, place) for part in data]
    return place(np.asarray(data))


def _unpack(data: Any, read: Callable[[WireArray], np.ndarray]) -> NestedTensors:
    if data is None:
        return None
    if isinstance(data, list):
        return [_unpack(part, read) for part in data]
    return read(data if isinstance(data, WireArray) else msgspec.convert(data, WireArray))
