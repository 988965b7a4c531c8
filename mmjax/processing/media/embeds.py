"""Embeddings as clients send them: one tensor in a safetensors file, in base64. Never a pickle."""

import binascii

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize

from mmjax.decoders.limits import MediaLimits
from mmjax.errors import MediaError, RequestTypeError, RequestValueError
from mmjax.processing.media.decode import decode_base64

MAX_HEADER_BYTES = 16 * 2**10
"""The longest header of a file: JSON that is read whole. One tensor takes some 100 bytes."""

_DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
_MAX_REASON = 200
"""Characters: the library's words may hold the file's own, such as names."""
_LENGTH_BYTES = 8
"""The file begins with its header's length, little-endian."""


def decode_embeds(text: str, limits: MediaLimits, *, param: str) -> np.ndarray:
    """Return the tensor of a safetensors file in base64, of the shape and dtype that it has there.

    Its values are not looked at. MediaError (422) where it is no such file.
    """
    num_bytes = len(text) // 4 * 3
    if num_bytes - 2 > limits.max_image_bytes:
        raise RequestValueError(
            f"`{param}` has about {num_bytes} bytes, at most {limits.max_image_bytes} are "
            "accepted; send fewer rows, or a 16-bit dtype",
            param=param,
        )
    try:
        data = decode_base64(text)
    except (binascii.Error, ValueError) as error:
        raise MediaError(
            f"`{param}` holds invalid base64: {error}; encode the file's bytes with standard "
            "base64, without a `data:` prefix",
            param=param,
        ) from error
    return _read_tensor(data, param)


def _read_tensor(data: bytes, param: str) -> np.ndarray:
    header_bytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or header_bytes > len(data) - _LENGTH_BYTES:
        raise _no_file(param, "it ends within its header")
    if header_bytes > MAX_HEADER_BYTES:
        raise _no_file(param, f"its header has more than {MAX_HEADER_BYTES} bytes")
    try:
        tensors = deserialize(data)
    except SafetensorError as error:
        raise _no_file(param, str(error)[:_MAX_REASON]) from error
    if len(tensors) != 1:
        raise RequestValueError(
            f"`{param}` is a safetensors file of {len(tensors)} tensors; send one tensor",
            param=param,
        )
    ((_, tensor),) = tensors
    dtype = _DTYPES.get(tensor["dtype"])
    if dtype is None:
        raise RequestTypeError(
            f"`{param}` is a tensor of dtype {tensor['dtype']}; send one of {', '.join(_DTYPES)}",
            param=param,
        )
    shape = tensor["shape"]
    # numpy has fewer axes than a file may have, and smaller ones beside an axis of 0.
    if len(shape) not in (2, 3) or 0 in shape:
        shown = f"{shape[:8]}, of {len(shape)} axes"
        raise RequestValueError(
            f"`{param}` is a tensor of shape {shown}; send [rows, width]", param=param
        )
    return np.frombuffer(tensor["data"], dtype).reshape(shape)


def _no_file(param: str, reason: str) -> MediaError:
    return MediaError(
        f"`{param}` is no safetensors file: {reason}; send what `safetensors.numpy.save` returns, "
        "base64 encoded",
        param=param,
    )
