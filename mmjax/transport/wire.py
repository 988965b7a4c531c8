"""Wire types of arrays, and of classes that contain arrays.

The wire type of a class is derived from its fields, which are all required; others are refused.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
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
from mmjax.processing.tensors.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from mmjax.processing.tensors.shared_item import SharedItem
from mmjax.transport.messages import EngineCoreRequest

Buffer = bytes | memoryview

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
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FrameError(MMJaxError):
    """Malformed frames, or of another version."""


# ---- arrays ------------------------------------------------------------------------------------


class WireArray(msgspec.Struct, tag="array", frozen=True, forbid_unknown_fields=True):
    """An array whose bytes are frame number `frame`."""

    dtype: str
    shape: list[int]
    frame: int


class WireList(msgspec.Struct, tag="list", frozen=True, forbid_unknown_fields=True):
    """A ragged batch: arrays, or lists of them."""

    items: list["WireArray | WireList"]


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
            raise FrameError(f"an array of dtype {array.dtype} has no wire form")
        # A view as bytes, which ZMQ sends without a copy.
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.frames.append(flat.data if flat.size else b"")
        self._packed.append(array)
        wire = WireArray(dtype=name, shape=list(array.shape), frame=len(self.frames))
        self._wire_by_id[id(array)] = wire
        return wire


def _read_array(wire: WireArray, frames: Sequence[Buffer]) -> np.ndarray:
    dtype = DTYPES.get(wire.dtype)
    if dtype is None:
        raise FrameError(f"an array has the unknown dtype {wire.dtype!r}")
    if not 1 <= wire.frame < len(frames):
        raise FrameError(f"an array names frame {wire.frame} of {len(frames)}")
    if min(wire.shape, default=0) < 0:
        raise FrameError(f"an array has the shape {wire.shape}")
    buffer = memoryview(frames[wire.frame])
    if math.prod(wire.shape) * dtype.itemsize != buffer.nbytes:
        raise FrameError(f"an array of shape {wire.shape} has a frame of {buffer.nbytes} bytes")
    flat = np.frombuffer(buffer, dtype=dtype) if buffer.nbytes else np.empty(0, dtype)
    if dtype == np.bool_ and (flat.view(np.uint8) > 1).any():
        raise FrameError("an array of bools has bytes other than 0 and 1")
    array = flat.reshape(wire.shape)
    array.flags.writeable = False
    return array


# ---- wire forms --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class WireForm:
    """Conversion of a class's values to and from a type that msgspec encodes."""

    cls: type
    """The value's class."""
    type: Any
    """The type that msgspec encodes and decodes."""
    pack: Callable[[Any, ArrayFrames], Any]
    unpack: Callable[[Any, Sequence[Buffer]], Any]
    """Raises FrameError, or the errors of the value's class."""


def _object(
    cls: type, *, tag: bool = False, array_like: bool = False, **forms: WireForm
) -> WireForm:
    """Return the form of a dataclass or message; `forms`: of the fields that need one.

    Other fields are encoded unchanged. `tag`: whether the class's name is encoded.
    """
    declared = (
        dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else msgspec.structs.fields(cls)
    )
    types = {field.name: field.type for field in declared if getattr(field, "init", True)}
    assert forms.keys() <= types.keys(), f"{cls.__name__} lacks some of {list(forms)}"
    names = list(types)
    struct = msgspec.defstruct(
        f"Wire{cls.__name__}",
        [(name, forms[name].type if name in forms else types[name]) for name in names],
        tag=cls.__name__ if tag else None,
        array_like=array_like,
        frozen=True,
        forbid_unknown_fields=True,
    )
    get = _getter(names)
    packs = [(names.index(name), form.pack) for name, form in forms.items()]
    unpacks = [(name, form.unpack) for name, form in forms.items()]

    def pack(value: Any, frames: ArrayFrames) -> Any:
        fields = get(value)
        for index, pack_field in packs:
            if fields[index] is not None:
                fields[index] = pack_field(fields[index], frames)
        return struct(*fields)

    def unpack(wire: Any, frames: Sequence[Buffer]) -> Any:
        fields = msgspec.structs.asdict(wire)
        for name, unpack_field in unpacks:
            if fields[name] is not None:
                fields[name] = unpack_field(fields[name], frames)
        return cls(**fields)

    return WireForm(cls, struct, pack, unpack)


def _getter(names: Sequence[str]) -> Callable[[Any], list[Any]]:
    """Return a function that returns a value's fields `names` as a list."""
    if len(names) == 1:
        return lambda value: [getattr(value, names[0])]
    get = attrgetter(*names)
    return lambda value: list(get(value))


def _either(first: WireForm, *others: WireForm) -> WireForm:
    """Return the form of a union of classes, whose wire types differ."""
    forms = (first, *others)
    by_class = {form.cls: form for form in forms}
    by_type = {getattr(form.type, "__origin__", form.type): form for form in forms}
    type_ = first.type
    for form in others:
        type_ |= form.type

    def pack(value: Any, frames: ArrayFrames) -> Any:
        form = by_class.get(type(value))
        if form is None:
            raise FrameError(f"a {type(value).__name__} has no wire form")
        return form.pack(value, frames)

    def unpack(wire: Any, frames: Sequence[Buffer]) -> Any:
        return by_type[type(wire)].unpack(wire, frames)

    return WireForm(object, type_, pack, unpack)


def _optional(form: WireForm) -> WireForm:
    """Return the form of a field that may be None."""
    return dataclasses.replace(form, type=form.type | None)


def _list(form: WireForm) -> WireForm:
    return WireForm(
        list,
        list[form.type],
        lambda values, frames: [form.pack(value, frames) for value in values],
        lambda wires, frames: [form.unpack(wire, frames) for wire in wires],
    )


# ---- fields of requests ------------------------------------------------------------------------


def _pack_tensors(data: NestedTensors, frames: ArrayFrames) -> WireArray | WireList:
    if isinstance(data, list | tuple):
        return WireList([_pack_tensors(item, frames) for item in data])
    return frames.add(np.asarray(data))


def _unpack_tensors(wire: WireArray | WireList, frames: Sequence[Buffer]) -> NestedTensors:
    if isinstance(wire, WireList):
        return [_unpack_tensors(item, frames) for item in wire.items]
    return _read_array(wire, frames)


_Bounds = tuple[int | None, int | None, int | None]
"""Start, stop and step of a slice."""


class WireSlices(msgspec.Struct, tag="slices", frozen=True, forbid_unknown_fields=True):
    """A slice for each axis."""

    axes: list[_Bounds]


def _bounds(part: slice) -> _Bounds:
    start, stop, step = (
        None if index is None else int(index) for index in (part.start, part.stop, part.step)
    )
    return start, stop, step


def _pack_slices(part: slice | Sequence[slice], _: ArrayFrames) -> _Bounds | WireSlices:
    return (
        _bounds(part) if isinstance(part, slice) else WireSlices([_bounds(axis) for axis in part])
    )


def _unpack_slices(wire: _Bounds | WireSlices, _: Sequence[Buffer]) -> slice | tuple[slice, ...]:
    if isinstance(wire, WireSlices):
        return tuple(slice(*bounds) for bounds in wire.axes)
    return slice(*wire)


def _pack_item(item: MultiModalKwargsItem, frames: ArrayFrames) -> dict[str, Any]:
    return {key: _ELEM.pack(elem, frames) for key, elem in item.items()}


def _unpack_item(wire: Mapping[str, Any], frames: Sequence[Buffer]) -> MultiModalKwargsItem:
    return MultiModalKwargsItem({key: _ELEM.unpack(elem, frames) for key, elem in wire.items()})


def _unpack_position(wire: Any, frames: Sequence[Buffer]) -> PlaceholderRange:
    position: PlaceholderRange = _POSITION.unpack(wire, frames)
    if position.offset < 0 or position.length < 0:
        raise FrameError(f"placeholder at {position.offset} of length {position.length}")
    mask = position.is_embed
    if mask is not None and (mask.dtype != np.bool_ or mask.shape != (position.length,)):
        raise FrameError(f"`is_embed` must be bool ({position.length},), not {mask.shape}")
    return position


_ARRAY = WireForm(np.ndarray, WireArray, lambda array, frames: frames.add(array), _read_array)
_TENSORS = WireForm(object, WireArray | WireList, _pack_tensors, _unpack_tensors)
_SLICES = WireForm(object, _Bounds | WireSlices, _pack_slices, _unpack_slices)
_FIELD = _either(
    _object(MultiModalBatchedField, tag=True),
    _object(MultiModalSharedField, tag=True),
    _object(MultiModalFlatField, tag=True, slices=_list(_SLICES)),
)
_ELEM = _object(MultiModalFieldElem, data=_optional(_TENSORS), field=_FIELD)
_ITEM = WireForm(MultiModalKwargsItem, dict[str, _ELEM.type], _pack_item, _unpack_item)
# As an array, since a map is an item's tensors.
_SHARED_ITEM = _object(SharedItem, array_like=True)
_POSITION = _object(PlaceholderRange, is_embed=_optional(_ARRAY))
_FEATURE = _object(
    MultiModalFeatureSpec,
    data=_optional(_either(_ITEM, _SHARED_ITEM)),
    mm_position=dataclasses.replace(_POSITION, unpack=_unpack_position),
)
REQUEST = _object(EngineCoreRequest, tag=True, mm_features=_list(_FEATURE))
