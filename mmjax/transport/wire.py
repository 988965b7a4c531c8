"""The wire form of requests, whose arrays are frames after the header."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, PlaceholderRange
from mmjax.processing.tensors.shared_item import SharedItem
from mmjax.processing.tensors.wire_forms import (
    DTYPES,
    WireArray,
    WireError,
    WireForm,
    either,
    item_form,
    list_of,
    object_form,
    optional,
)
from mmjax.transport.messages import EngineCoreRequest

Buffer = bytes | memoryview

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ArrayFrames:
    """The frames after the header; an array that occurs twice in a message is sent once."""

    def __init__(self) -> None:
        self.frames: list[Buffer] = []
        self._wire_by_id: dict[int, WireArray] = {}
        self._packed: list[np.ndarray] = []  # keeps arrays alive, so that ids are unique

    def add(self, array: np.ndarray) -> WireArray:
        """Add an array's frame, which shares its memory, and return its reference in the header."""
        known = self._wire_by_id.get(id(array))
        if known is not None:
            return known
        name = _DTYPE_NAMES.get(array.dtype)
        if name is None:
            raise WireError(f"an array of dtype {array.dtype} has no wire form")
        # A view as bytes, which ZMQ sends without a copy.
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.frames.append(flat.data if flat.size else b"")
        self._packed.append(array)
        wire = WireArray(dtype=name, shape=list(array.shape), place=len(self.frames))
        self._wire_by_id[id(array)] = wire
        return wire


def _read_array(wire: WireArray, frames: Sequence[Buffer]) -> np.ndarray:
    dtype = DTYPES.get(wire.dtype)
    if dtype is None:
        raise WireError(f"an array has the unknown dtype {wire.dtype!r}")
    if not 1 <= wire.place < len(frames):
        raise WireError(f"an array names frame {wire.place} of {len(frames)}")
    if min(wire.shape, default=0) < 0:
        raise WireError(f"an array has the shape {wire.shape}")
    buffer = memoryview(frames[wire.place])
    if math.prod(wire.shape) * dtype.itemsize != buffer.nbytes:
        raise WireError(f"an array of shape {wire.shape} has a frame of {buffer.nbytes} bytes")
    flat = np.frombuffer(buffer, dtype=dtype) if buffer.nbytes else np.empty(0, dtype)
    if dtype == np.bool_ and (flat.view(np.uint8) > 1).any():
        raise WireError("an array of bools has bytes other than 0 and 1")
    array = flat.reshape(wire.shape)
    array.flags.writeable = False
    return array


def _unpack_position(wire: Any, frames: Sequence[Buffer]) -> PlaceholderRange:
    position: PlaceholderRange = _POSITION.unpack(wire, frames)
    if position.offset < 0 or position.length < 0:
        raise WireError(f"placeholder at {position.offset} of length {position.length}")
    mask = position.is_embed
    if mask is not None and (mask.dtype != np.bool_ or mask.shape != (position.length,)):
        raise WireError(f"`is_embed` must be bool ({position.length},), not {mask.shape}")
    return position


_ARRAY = WireForm(np.ndarray, WireArray, lambda array, frames: frames.add(array), _read_array)
# As an array, since a map is an item's tensors.
_SHARED_ITEM = object_form(SharedItem, array_like=True)
_POSITION = object_form(PlaceholderRange, is_embed=optional(_ARRAY))
_FEATURE = object_form(
    MultiModalFeatureSpec,
    data=optional(either(item_form(_ARRAY), _SHARED_ITEM)),
    mm_position=dataclasses.replace(_POSITION, unpack=_unpack_position),
)
REQUEST = object_form(EngineCoreRequest, tag=True, mm_features=list_of(_FEATURE))
