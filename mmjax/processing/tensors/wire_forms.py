"""Wire forms: how arrays, and classes that contain arrays, are encoded by msgspec.

The wire type of a class is derived from its fields, which are all required; others are refused.
What becomes of the arrays' bytes is up to the form of arrays: frames of a message, shared memory.
"""

import dataclasses
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


class WireList(msgspec.Struct, tag="list", frozen=True, forbid_unknown_fields=True):
    """A ragged batch: arrays, or lists of them."""

    items: list["WireArray | WireList | None"]


@dataclasses.dataclass(frozen=True, slots=True)
class WireForm:
    """Conversion of a class's values to and from a type that msgspec encodes."""

    cls: type
    """The value's class."""
    type: Any
    """The type that msgspec encodes and decodes."""
    pack: Callable[[Any, Any], Any]
    """(value, where arrays go) -> what msgspec encodes."""
    unpack: Callable[[Any, Any], Any]
    """(what msgspec decoded, where arrays are) -> value; WireError, or the class's errors."""


def object_form(
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

    def pack(value: Any, arrays: Any) -> Any:
        fields = get(value)
        for index, pack_field in packs:
            if fields[index] is not None:
                fields[index] = pack_field(fields[index], arrays)
        return struct(*fields)

    def unpack(wire: Any, arrays: Any) -> Any:
        fields = msgspec.structs.asdict(wire)
        for name, unpack_field in unpacks:
            if fields[name] is not None:
                fields[name] = unpack_field(fields[name], arrays)
        return cls(**fields)

    return WireForm(cls, struct, pack, unpack)


def _getter(names: Sequence[str]) -> Callable[[Any], list[Any]]:
    """Return a function that returns a value's fields `names` as a list."""
    if len(names) == 1:
        return lambda value: [getattr(value, names[0])]
    get = attrgetter(*names)
    return lambda value: list(get(value))


def either(first: WireForm, *others: WireForm) -> WireForm:
    """Return the form of a union of classes, whose wire types differ."""
    forms = (first, *others)
    by_class = {form.cls: form for form in forms}
    by_type = {getattr(form.type, "__origin__", form.type): form for form in forms}
    type_ = first.type
    for form in others:
        type_ |= form.type

    def pack(value: Any, arrays: Any) -> Any:
        form = by_class.get(type(value))
        if form is None:
            raise WireError(f"a {type(value).__name__} has no wire form")
        return form.pack(value, arrays)

    def unpack(wire: Any, arrays: Any) -> Any:
        return by_type[type(wire)].unpack(wire, arrays)

    return WireForm(object, type_, pack, unpack)


def optional(form: WireForm) -> WireForm:
    """Return the form of a field that may be None."""
    return dataclasses.replace(form, type=form.type | None)


def list_of(form: WireForm) -> WireForm:
    """Return the form of a list."""
    return WireForm(
        list,
        list[form.type],
        lambda values, arrays: [form.pack(value, arrays) for value in values],
        lambda wires, arrays: [form.unpack(wire, arrays) for wire in wires],
    )


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


def _pack_slices(part: slice | Sequence[slice], _: Any) -> _Bounds | WireSlices:
    return (
        _bounds(part) if isinstance(part, slice) else WireSlices([_bounds(axis) for axis in part])
    )


def _unpack_slices(wire: _Bounds | WireSlices, _: Any) -> slice | tuple[slice, ...]:
    if isinstance(wire, WireSlices):
        return tuple(slice(*bounds) for bounds in wire.axes)
    return slice(*wire)


_FIELD = either(
    object_form(MultiModalBatchedField, tag=True),
    object_form(MultiModalSharedField, tag=True),
    object_form(
        MultiModalFlatField,
        tag=True,
        slices=list_of(WireForm(object, _Bounds | WireSlices, _pack_slices, _unpack_slices)),
    ),
)


def item_form(array: WireForm) -> WireForm:
    """Return the form of a `MultiModalKwargsItem` whose arrays have the form `array`."""

    def pack_tensors(data: NestedTensors, arrays: Any) -> WireArray | WireList | None:
        if data is None:
            return None
        if isinstance(data, list | tuple):
            return WireList([pack_tensors(part, arrays) for part in data])
        return array.pack(np.asarray(data), arrays)

    def unpack_tensors(wire: WireArray | WireList | None, arrays: Any) -> NestedTensors:
        if isinstance(wire, WireList):
            return [unpack_tensors(part, arrays) for part in wire.items]
        return None if wire is None else array.unpack(wire, arrays)

    tensors = WireForm(object, WireArray | WireList, pack_tensors, unpack_tensors)
    elem = object_form(MultiModalFieldElem, data=optional(tensors), field=_FIELD)

    def pack(item: MultiModalKwargsItem, arrays: Any) -> dict[str, Any]:
        return {key: elem.pack(value, arrays) for key, value in item.items()}

    def unpack(wire: Mapping[str, Any], arrays: Any) -> MultiModalKwargsItem:
        return MultiModalKwargsItem({key: elem.unpack(one, arrays) for key, one in wire.items()})

    return WireForm(MultiModalKwargsItem, dict[str, elem.type], pack, unpack)
