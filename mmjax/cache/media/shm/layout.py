"""Layout of an item's arrays in one file: the writer decides all offsets, the reader makes views.

The reader is sent the offsets as msgpack.
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np

from mmjax.processing.tensors.inputs import MultiModalKwargsItem
from mmjax.processing.tensors.wire_forms import DTYPES, WireArray, WireError, WireForm, item_form
from mmjax.rounding import round_up

ALIGNMENT = 64
"""Alignment of arrays in bytes: the size of a cache line, and of a vector register."""

Arrays = list[tuple[int, np.ndarray]]
"""(offset, C-contiguous array of a wire dtype)"""


class Plan(NamedTuple):
    """Where an item's arrays will be in its file."""

    layout: bytes
    arrays: Arrays
    size: int
    """Bytes of the file."""


def make_plan(item: MultiModalKwargsItem) -> Plan | None:
    """Lay an item out; None if it holds dtypes or fields without a wire form, or no bytes."""
    arrays: Arrays = []
    try:
        layout = _ENCODER.encode(_ITEM.pack(item, arrays))
    except WireError:
        return None
    size = _stop(arrays)
    return Plan(layout, arrays, size) if size else None


def view_item(layout: bytes, root: np.ndarray) -> MultiModalKwargsItem:
    """Return an item whose arrays are views of `root`, uint8[size]."""
    return _ITEM.unpack(_DECODER.decode(layout), root)


def _place(array: np.ndarray, arrays: Arrays) -> WireArray:
    if array.dtype.name not in DTYPES:
        raise WireError(f"an array of dtype {array.dtype} has no wire form")
    offset = round_up(_stop(arrays), ALIGNMENT)
    # An array of ndarray's subclasses comes as a plain one; `order` keeps () as (), not (1,).
    arrays.append((offset, np.array(array, DTYPES[array.dtype.name], copy=None, order="C")))
    return WireArray(array.dtype.name, list(array.shape), offset)


def _stop(arrays: Arrays) -> int:
    if not arrays:
        return 0
    offset, last = arrays[-1]
    return offset + last.nbytes


def _view(wire: WireArray, root: np.ndarray) -> np.ndarray:
    dtype = DTYPES[wire.dtype]
    num_bytes = math.prod(wire.shape) * dtype.itemsize
    return root[wire.place : wire.place + num_bytes].view(dtype).reshape(wire.shape)


_ITEM = item_form(WireForm(np.ndarray, WireArray, _place, _view))
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_ITEM.type)
