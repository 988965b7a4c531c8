"""Messages to frames and back: a msgpack header, then one raw frame per array.

Frame 0 is a version byte and the header; arrays are further frames, which are not copied by either
side (decoded arrays are read-only views). Only types declared in messages.py or wire.py can be
decoded.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec

from mmjax.processing.tensors.wire_forms import WireError
from mmjax.transport.messages import (
    EngineCoreRequest,
    EngineMessage,
    FrontendMessage,
    RequestOutputDelta,
    StepOutput,
)
from mmjax.transport.wire import RECEIVED, ArrayFrames, Buffer, check_position, unpack

__all__ = [
    "VERSION",
    "Buffer",
    "Message",
    "Remainder",
    "WireError",
    "decode",
    "encode",
    "read_remainder",
]

VERSION = 10
"""The first byte of every message; a reader refuses any other."""

Message = EngineMessage | FrontendMessage
T = TypeVar("T")

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Message, dec_hook=unpack)


def encode(message: Message) -> list[Buffer]:
    """Return the frames of `message`; the array frames share memory with the arrays."""
    return pack_frames(message, has_arrays=isinstance(message, EngineCoreRequest))


def pack_frames(message: msgspec.Struct, *, has_arrays: bool) -> list[Buffer]:
    """Return the frames of any message."""
    arrays, encoder = ArrayFrames(), _ENCODER
    if has_arrays:
        encoder = msgspec.msgpack.Encoder(enc_hook=arrays.pack)
    try:
        header = encoder.encode(message)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise WireError(f"the message cannot be encoded: {error}") from error
    return [bytes([VERSION]) + header, *arrays.frames]


class Remainder(NamedTuple):
    """What can be read of a message that cannot be decoded."""

    request_ids: list[str]
    """The requests for which it is lost."""
    output: StepOutput
    """What it says of others."""


def read_remainder(frames: Sequence[Buffer]) -> Remainder | None:
    """Return what can be read of a message; None if not even whom it concerns."""
    remainder = Remainder([], StepOutput(deltas=[]))
    try:
        wire = msgspec.msgpack.decode(memoryview(frames[0]).cast("B")[1:])
        for part in wire["deltas"] if wire["type"] == StepOutput.__name__ else [wire]:
            # No other message has what a delta needs.
            try:
                remainder.output.deltas.append(msgspec.convert(part, RequestOutputDelta))
            except msgspec.ValidationError:
                remainder.request_ids.append(msgspec.convert(part["request_id"], str))
    except (msgspec.MsgspecError, LookupError, ValueError, TypeError, RecursionError):
        return None
    return remainder if remainder.request_ids else None


def decode(frames: Sequence[Buffer]) -> Message:
    """Return the message; WireError, and no other error, on malformed frames."""
    message = unpack_frames(frames, _DECODER)
    if isinstance(message, EngineCoreRequest):
        for feature in message.mm_features:
            check_position(feature.mm_position)
    return message


def unpack_frames(frames: Sequence[Buffer], decoder: "msgspec.msgpack.Decoder[T]") -> T:
    """Return a message of the types that `decoder` knows; WireError on malformed frames."""
    if not frames or not len(frames[0]):
        raise WireError("the message is empty; expected a version byte and a header")
    header = memoryview(frames[0]).cast("B")
    if header[0] != VERSION:
        raise WireError(f"the message has version {header[0]}; expected {VERSION}")
    token = RECEIVED.set(frames)
    try:
        return decoder.decode(header[1:])
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"the message cannot be decoded: {error}") from error
    finally:
        RECEIVED.reset(token)
