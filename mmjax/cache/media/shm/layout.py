"""Layout of an item's arrays in one object: the writer copies them, the reader makes views.

The writer decides all offsets; the reader is sent them as msgpack.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import msgspec
import numpy as np

from mmjax.cache.media.shm.segment import HEADER
from mmjax.processing.tensors.fields import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
    NestedTensors,
)
from mmjax.processing.tensors.inputs import MultiModalKwargsItem
from mmjax.rounding import round_up

ALIGNMENT = 64
"""Alignment of arrays in bytes: the size of a cache line, and of a vector register."""

_DTYPES: Mapping[str, np.dtype] = {
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


class _Array(msgspec.Struct, tag="array", array_like=True, frozen=True):
    dtype: str
    shape: list[int]
    offset: int


class _List(msgspec.Struct, tag="list", array_like=True, frozen=True):
    items: list["_Array | _List | None"]


class _Batched(msgspec.Struct, tag="batched", array_like=True, frozen=True):
    keep_on_cpu: bool


class _Flat(msgspec.Struct, tag="flat", array_like=True, frozen=True):
    keep_on_cpu: bool
    slices: list[list[tuple[int | None, int | None, int | None]]]
    is_nested: bool
    dim: int


class _Shared(msgspec.Struct, tag="shared", array_like=True, frozen=True):
    keep_on_cpu: bool
    batch_size: int


class _Elem(msgspec.Struct, array_like=True, frozen=True):
    data: _Array | _List | None
    field: _Batched | _Flat | _Shared


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(dict[str, _Elem])


class Plan(NamedTuple):
    """Where an item's arrays will be in an object."""

    layout: bytes
    arrays: list[tuple[int, np.ndarray]]
    """(offset, array)"""
    size: int
    """Bytes, including the header."""

    def write(self, buffer: memoryview) -> None:
        """Copy the arrays to their offsets in an object's bytes."""
        for offset, array in self.arrays:
            if array.size:
                dtype = _DTYPES[array.dtype.name]
                part = buffer[offset : offset + array.size * dtype.itemsize]
                np.copyto(np.frombuffer(part, dtype).reshape(array.shape), array)


def make_plan(item: MultiModalKwargsItem) -> Plan | None:
    """Lay an item out; None if it holds dtypes or fields that an object cannot (sent instead)."""
    arrays: list[tuple[int, np.ndarray]] = []
    try:
        elems = {
            key: _Elem(_lay_out(elem.data, arrays), _describe_field(elem.field))
            for key, elem in item.items()
        }
    except _NoLayoutError:
        return None
    size = max((_stop(offset, array) for offset, array in arrays), default=HEADER)
    return Plan(_ENCODER.encode(elems), arrays, size)


class _NoLayoutError(Exception):
    pass


def _lay_out(data: NestedTensors, arrays: list[tuple[int, np.ndarray]]) -> _Array | _List | None:
    if data is None:
        return None
    if isinstance(data, list | tuple):
        return _List([_lay_out(part, arrays) for part in data])
    array = np.asarray(data)
    if array.dtype.name not in _DTYPES:
        raise _NoLayoutError
    stop = _stop(*arrays[-1]) if arrays else HEADER
    offset = round_up(stop, ALIGNMENT)
    arrays.append((offset, array))
    return _Array(array.dtype.name, list(array.shape), offset)


def _stop(offset: int, array: np.ndarray) -> int:
    return offset + array.nbytes


def _describe_field(field: BaseMultiModalField) -> _Batched | _Flat | _Shared:
    match field:
        case MultiModalBatchedField():
            return _Batched(field.keep_on_cpu)
        case MultiModalSharedField():
            return _Shared(field.keep_on_cpu, field.batch_size)
        case MultiModalFlatField():
            is_nested = any(not isinstance(part, slice) for part in field.slices)
            parts = [[part] if isinstance(part, slice) else part for part in field.slices]
            slices = [[_bounds(one) for one in part] for part in parts]
            return _Flat(field.keep_on_cpu, slices, is_nested, field.dim)
    raise _NoLayoutError


def _bounds(one: slice) -> tuple[int | None, int | None, int | None]:
    start, stop, step = (None if n is None else int(n) for n in (one.start, one.stop, one.step))
    return start, stop, step


def view_item(layout: bytes, root: np.ndarray) -> MultiModalKwargsItem:
    """Return an item whose arrays are views of `root`, uint8[size]."""
    return MultiModalKwargsItem(
        {
            key: MultiModalFieldElem(_view(elem.data, root), _make_field(elem.field))
            for key, elem in _DECODER.decode(layout).items()
        }
    )


def _view(data: _Array | _List | None, root: np.ndarray) -> NestedTensors:
    if data is None:
        return None
    if isinstance(data, _List):
        return [_view(part, root) for part in data.items]
    dtype = _DTYPES[data.dtype]
    num_bytes = math.prod(data.shape) * dtype.itemsize
    return root[data.offset : data.offset + num_bytes].view(dtype).reshape(data.shape)


def _make_field(field: _Batched | _Flat | _Shared) -> BaseMultiModalField:
    match field:
        case _Batched():
            return MultiModalBatchedField(keep_on_cpu=field.keep_on_cpu)
        case _Shared():
            return MultiModalSharedField(batch_size=field.batch_size, keep_on_cpu=field.keep_on_cpu)
        case _Flat():
            parts = [tuple(slice(*bounds) for bounds in part) for part in field.slices]
            slices = parts if field.is_nested else [one for (one,) in parts]
            return MultiModalFlatField(slices=slices, dim=field.dim, keep_on_cpu=field.keep_on_cpu)
