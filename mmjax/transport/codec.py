"""Messages to frames and back: a msgpack header, then one raw frame per array.

Frame 0 is one version byte and the header; the arrays follow out of band, so that they are
neither copied on the way out nor on the way in (they come back as read-only views).
Every type on the wire is declared in wire.py or messages.py, and nothing else can be decoded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from mmjax.errors import MMJaxError
from mmjax.processing.tensors.fields import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
)
from mmjax.processing.tensors.inputs import (
    ItemData,
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from mmjax.processing.tensors.shared_item import SharedItem
from mmjax.transport.messages import (
    AbortRequests,
    CacheMiss,
    EngineCoreRequest,
    EngineMessage,
    FrontendMessage,
    Heartbeat,
    Ready,
    RequestFailed,
    Shutdown,
    StepOutput,
)
from mmjax.transport.wire import (
    DTYPES,
    WireArray,
    WireBatched,
    WireElem,
    WireEngineCoreRequest,
    WireFeature,
    WireFlat,
    WireList,
    WireShared,
    WireSharedItem,
)

VERSION = 3
"""The first byte of every message; a reader refuses any other."""

Buffer = bytes | memoryview
Message = EngineMessage | FrontendMessage


class FrameError(MMJaxError):
    """Frames that are not a message of this version."""


_WireMessage = (
    WireEngineCoreRequest
    | AbortRequests
    | Shutdown
    | StepOutput
    | RequestFailed
    | CacheMiss
    | Ready
    | Heartbeat
)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_WireMessage)


# ---- out ---------------------------------------------------------------------------------------


def encode(message: Message) -> list[Buffer]:
    """Return the frames of `message`; the array frames share memory with the arrays."""
    frames = _Frames()
    try:
        wire = _pack_request(message, frames) if isinstance(message, EngineCoreRequest) else message
        header = _ENCODER.encode(wire)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise FrameError(f"the message cannot be encoded: {error}") from error
    return [bytes([VERSION]) + header, *frames.arrays]


class _Frames:
    """The frames behind the header; an array that stands in a message twice is sent once."""

    def __init__(self) -> None:
        self.arrays: list[Buffer] = []
        self._wire_by_id: dict[int, WireArray] = {}
        self._packed: list[np.ndarray] = []  # held, so that no id is given away

    def add(self, array: np.ndarray) -> WireArray:
        known = self._wire_by_id.get(id(array))
        if known is not None:
            return known
        if array.dtype.name not in DTYPES:
            raise FrameError(f"an array of dtype {array.dtype.name} has no wire form")
        # A view as bytes: msgpack never sees it, and ZMQ sends it from where it lies.
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.arrays.append(flat.data if flat.size else b"")
        self._packed.append(array)
        wire = WireArray(dtype=array.dtype.name, shape=list(array.shape), frame=len(self.arrays))
        self._wire_by_id[id(array)] = wire
        return wire


def _pack_request(request: EngineCoreRequest, frames: _Frames) -> WireEngineCoreRequest:
    fields = {name: getattr(request, name) for name in EngineCoreRequest.__struct_fields__}
    fields["mm_features"] = [_pack_feature(item, frames) for item in request.mm_features]
    return WireEngineCoreRequest(**fields)


def _pack_feature(feature: MultiModalFeatureSpec, frames: _Frames) -> WireFeature:
    position = feature.mm_position
    return WireFeature(
        data=_pack_item(feature.data, frames),
        modality=feature.modality,
        identifier=feature.identifier,
        offset=position.offset,
        length=position.length,
        is_embed=None if position.is_embed is None else frames.add(position.is_embed),
        mm_hash=feature.mm_hash,
    )


def _pack_item(
    item: ItemData | None, frames: _Frames
) -> dict[str, WireElem] | WireSharedItem | None:
    if item is None:
        return None
    if isinstance(item, SharedItem):
        return WireSharedItem(**asdict(item))
    return {key: _pack_elem(item[key], frames) for key in item}


def _pack_elem(elem: MultiModalFieldElem, frames: _Frames) -> WireElem:
    data = None if elem.data is None else _pack_data(elem.data, frames)
    return WireElem(data=data, field=_pack_field(elem.field))


def _pack_field(field: object) -> WireBatched | WireFlat | WireShared:
    match field:
        case MultiModalBatchedField():
            return WireBatched(keep_on_cpu=field.keep_on_cpu)
        case MultiModalSharedField():
            return WireShared(batch_size=field.batch_size, keep_on_cpu=field.keep_on_cpu)
        case MultiModalFlatField():
            return WireFlat(
                slices=[_pack_slices(item) for item in field.slices],
                is_nested=any(not isinstance(item, slice) for item in field.slices),
                dim=field.dim,
                keep_on_cpu=field.keep_on_cpu,
            )
    raise FrameError(f"a field of type {type(field).__name__} has no wire form")


def _pack_slices(
    item: slice | Sequence[slice],
) -> list[tuple[int | None, int | None, int | None]]:
    slices = [item] if isinstance(item, slice) else item
    return [(_plain(s.start), _plain(s.stop), _plain(s.step)) for s in slices]


def _plain(index: Any) -> int | None:
    return None if index is None else int(index)


def _pack_data(data: Any, frames: _Frames) -> WireArray | WireList:
    if isinstance(data, list | tuple):
        return WireList([_pack_data(item, frames) for item in data])
    return frames.add(np.asarray(data))


# ---- in ----------------------------------------------------------------------------------------


def decode(frames: Sequence[Buffer]) -> Message:
    """Return the message; raises FrameError, and nothing else, on frames that are not one."""
    if not frames or not len(frames[0]):
        raise FrameError("the message is empty; expected a version byte and a header")
    header = memoryview(frames[0]).cast("B")
    if header[0] != VERSION:
        raise FrameError(f"the message has version {header[0]}; expected {VERSION}")
    try:
        wire = _DECODER.decode(header[1:])
        return _unpack_request(wire, frames) if isinstance(wire, WireEngineCoreRequest) else wire
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise FrameError(f"the message cannot be decoded: {error}") from error


def _unpack_request(wire: WireEngineCoreRequest, frames: Sequence[Buffer]) -> EngineCoreRequest:
    fields = {name: getattr(wire, name) for name in WireEngineCoreRequest.__struct_fields__}
    fields["mm_features"] = [_unpack_feature(item, frames) for item in wire.mm_features]
    return EngineCoreRequest(**fields)


def _unpack_feature(wire: WireFeature, frames: Sequence[Buffer]) -> MultiModalFeatureSpec:
    is_embed = None if wire.is_embed is None else _unpack_array(wire.is_embed, frames)
    if wire.offset < 0 or wire.length < 0:
        raise FrameError(f"placeholder at {wire.offset} of length {wire.length}")
    if is_embed is not None and (is_embed.dtype != np.bool_ or is_embed.shape != (wire.length,)):
        raise FrameError(f"`is_embed` must be bool ({wire.length},), not {is_embed.shape}")
    return MultiModalFeatureSpec(
        data=_unpack_item(wire.data, frames),
        modality=wire.modality,
        identifier=wire.identifier,
        mm_position=PlaceholderRange(offset=wire.offset, length=wire.length, is_embed=is_embed),
        mm_hash=wire.mm_hash,
    )


def _unpack_item(
    data: Mapping[str, WireElem] | WireSharedItem | None, frames: Sequence[Buffer]
) -> ItemData | None:
    if data is None:
        return None
    if isinstance(data, WireSharedItem):
        return SharedItem(**msgspec.structs.asdict(data))
    return MultiModalKwargsItem({key: _unpack_elem(elem, frames) for key, elem in data.items()})


def _unpack_elem(elem: WireElem, frames: Sequence[Buffer]) -> MultiModalFieldElem:
    data = None if elem.data is None else _unpack_data(elem.data, frames)
    return MultiModalFieldElem(data=data, field=_unpack_field(elem.field))


def _unpack_field(
    wire: WireBatched | WireFlat | WireShared,
) -> MultiModalBatchedField | MultiModalFlatField | MultiModalSharedField:
    match wire:
        case WireBatched():
            return MultiModalBatchedField(keep_on_cpu=wire.keep_on_cpu)
        case WireShared():
            return MultiModalSharedField(batch_size=wire.batch_size, keep_on_cpu=wire.keep_on_cpu)
        case WireFlat():
            return MultiModalFlatField(
                slices=_unpack_slices(wire), dim=wire.dim, keep_on_cpu=wire.keep_on_cpu
            )


def _unpack_slices(wire: WireFlat) -> Sequence[slice] | Sequence[Sequence[slice]]:
    if wire.is_nested:
        return [tuple(slice(*bounds) for bounds in item) for item in wire.slices]
    if any(len(item) != 1 for item in wire.slices):
        raise FrameError("a flat field has slices over several axes, but is not nested")
    return [slice(*item[0]) for item in wire.slices]


def _unpack_data(wire: WireArray | WireList, frames: Sequence[Buffer]) -> Any:
    if isinstance(wire, WireList):
        return [_unpack_data(item, frames) for item in wire.items]
    return _unpack_array(wire, frames)


def _unpack_array(wire: WireArray, frames: Sequence[Buffer]) -> np.ndarray:
    dtype = DTYPES.get(wire.dtype)
    if dtype is None:
        raise FrameError(f"an array has the unknown dtype {wire.dtype!r}")
    if not 1 <= wire.frame < len(frames):
        raise FrameError(f"an array names frame {wire.frame} of {len(frames)}")
    if any(size < 0 for size in wire.shape):
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
