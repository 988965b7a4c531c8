"""The wire form of a request's arrays: frames after the header."""

import math
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import msgspec
import numpy as np

from mmjax.processing.tensors.inputs import (
    MultiModalKwargsItem,
    PlaceholderRange,
    SharedItem,
)
from mmjax.processing.tensors.wire_forms import (
    DTYPES,
    WireArray,
    WireError,
    pack_item,
    unpack_item,
)

Buffer = bytes | memoryview

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ArrayFrames:
    """The frames after the header; an array that occurs twice in a message is sent once."""

    def __init__(self) -> None:
        self.frames: list[Buffer] = []
        self._wire_by_id: dict[int, WireArray] = {}
        self._packed: list[np.ndarray] = []  # keeps arrays alive, so that ids are unique

    def pack(self, value: Any) -> Any:
        """Return what msgspec encodes in the place of a value that it does not know."""
        if isinstance(value, MultiModalKwargsItem):
            return pack_item(value, self.add)
        if isinstance(value, np.ndarray):
            return self.add(value)
        raise TypeError(f"a {type(value).__name__} has no wire form")

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


RECEIVED: ContextVar[Sequence[Buffer]] = ContextVar("RECEIVED")
"""The frames of the message that is being decoded."""


def unpack(kind: type, wire: Any) -> Any:
    """Return the value of a type that msgspec does not know: an array, or an item's data."""
    if kind is np.ndarray:
        return _read_array(msgspec.convert(wire, WireArray))
    # As an array, since a map is an item's tensors.
    if isinstance(wire, list):
        return msgspec.convert(wire, SharedItem)
    return unpack_item(wire, _read_array)


def _read_array(wire: WireArray) -> np.ndarray:
    frames = RECEIVED.get()
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


def check_position(position: PlaceholderRange) -> None:
    """Refuse a placeholder whose parts do not fit each other."""
    if position.offset < 0 or position.length < 0:
        raise WireError(f"placeholder at {position.offset} of length {position.length}")
    mask = position.is_embed
    if mask is not None and (mask.dtype != np.bool_ or mask.shape != (position.length,)):
        raise WireError(f"`is_embed` must be bool ({position.length},), not {mask.shape}")
