"""Content hashes of items: the same content, model and processor kwargs give the same hex string.

The byte stream is framed (every chunk is preceded by its length) and typed (every value is
preceded by a tag), so that two different inputs never write the same stream.
"""

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from blake3 import blake3
from PIL import ExifTags, Image

from mmjax.processing.media import MediaWithBytes, as_numpy, is_array_like

Chunk = bytes | memoryview

_NONE, _SEQUENCE, _MAPPING, _LEAF = b"\x00", b"\x01", b"\x02", b"\x03"


@runtime_checkable
class _Hash(Protocol):
    def update(self, data: Chunk, /) -> Any: ...
    def hexdigest(self) -> str: ...


_ALGORITHMS = {"blake3": blake3, "sha256": hashlib.sha256, "sha512": hashlib.sha512}


class MultiModalHasher:
    """Hashes keyword arguments of the types that items and processor kwargs are made of."""

    def __init__(self, algorithm: str = "blake3") -> None:
        if algorithm not in _ALGORITHMS:
            known = ", ".join(f"`{name}`" for name in _ALGORITHMS)
            raise ValueError(f"hash algorithm `{algorithm}` is unknown; choose one of {known}")
        self.algorithm = algorithm

    def hash_kwargs(self, **kwargs: object) -> str:
        """Return the hex digest; the order of the arguments does not matter."""
        digest: _Hash = _ALGORITHMS[self.algorithm]()
        for key in sorted(kwargs):
            for chunk in self.iter_item_to_bytes(key, kwargs[key]):
                digest.update(chunk)
        return digest.hexdigest()

    @classmethod
    def serialize_item(cls, obj: object) -> bytes:
        """Return the stream of one value, for tests and for debugging."""
        return b"".join(cls.iter_value_to_bytes(obj))

    @classmethod
    def iter_item_to_bytes(cls, key: str, obj: object) -> Iterator[Chunk]:
        """Yield the stream of one named value."""
        yield from _leaf("str", key.encode())
        yield from cls.iter_value_to_bytes(obj)

    @classmethod
    def iter_value_to_bytes(cls, obj: object) -> Iterator[Chunk]:
        """Yield the stream of one value: scalar, bytes, array, image, sequence or mapping."""
        if obj is None:
            yield from _frame(_NONE)
        elif isinstance(obj, list | tuple):
            yield from _frame(_SEQUENCE + len(obj).to_bytes(8, "little"))
            for value in obj:
                yield from cls.iter_value_to_bytes(value)
        elif isinstance(obj, Mapping):
            yield from _frame(_MAPPING + len(obj).to_bytes(8, "little"))
            for key, value in obj.items():
                if not isinstance(key, str):
                    raise TypeError(f"cannot hash a mapping with the key {key!r}; keys must be str")
                yield from cls.iter_item_to_bytes(key, value)
        elif isinstance(obj, MediaWithBytes):
            yield from cls._iter_media(obj)
        elif isinstance(obj, Image.Image):
            yield from cls._iter_image(obj)
        elif is_array_like(obj):
            yield from cls._iter_array(as_numpy(obj))
        else:
            yield from _iter_scalar(obj)

    @classmethod
    def _iter_media(cls, obj: MediaWithBytes) -> Iterator[Chunk]:
        if isinstance(obj.media, Image.Image):
            image_id = _exif_image_id(obj.media)
            if image_id is not None:
                yield from _leaf("bytes", image_id.bytes)
                return
        elif is_array_like(obj.media) and as_numpy(obj.media).nbytes < len(obj.original_bytes):
            # Decoded frames may be fewer than the file holds: they are then the content.
            yield from cls._iter_array(as_numpy(obj.media))
            return
        if obj.io_config is None:
            yield from cls.iter_item_to_bytes("image", obj.original_bytes)
        else:
            parts = {"io_config": obj.io_config, "data": obj.original_bytes}
            yield from cls.iter_item_to_bytes("image", parts)

    @classmethod
    def _iter_image(cls, image: Image.Image) -> Iterator[Chunk]:
        image_id = _exif_image_id(image)
        if image_id is not None:
            yield from _leaf("bytes", image_id.bytes)
            return
        parts: dict[str, object] = {"mode": image.mode, "data": np.asarray(image)}
        if image.palette is not None:
            parts["palette"] = bytes(image.palette.palette)
            parts["palette_rawmode"] = image.palette.rawmode
        yield from cls.iter_item_to_bytes("image", parts)

    @classmethod
    def _iter_array(cls, array: np.ndarray) -> Iterator[Chunk]:
        if array.dtype.hasobject:
            raise TypeError(f"cannot hash an array of dtype {array.dtype}")
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        yield from _frame(_LEAF + b"ndarray")
        yield from cls.iter_value_to_bytes(
            [str(array.dtype), array.dtype.byteorder, list(array.shape)]
        )
        yield from _frame(data.data)


def _frame(data: Chunk) -> Iterator[Chunk]:
    yield len(data).to_bytes(8, "little")
    yield data


def _leaf(kind: str, data: Chunk) -> Iterator[Chunk]:
    yield from _frame(_LEAF + kind.encode())
    yield from _frame(data)


def _iter_scalar(obj: object) -> Iterator[Chunk]:
    if isinstance(obj, str):
        return _leaf("str", obj.encode("utf-8", "surrogatepass"))
    if isinstance(obj, bytes | bytearray):
        return _leaf("bytes", bytes(obj))
    if isinstance(obj, memoryview):
        return _leaf("bytes", obj.cast("B") if obj.c_contiguous else obj.tobytes())
    if isinstance(obj, bool):
        return _leaf("bool", b"\x01" if obj else b"\x00")
    if isinstance(obj, int):
        size = max(8, obj.bit_length() // 8 + 1)
        return _leaf("int", obj.to_bytes(size, "little", signed=True))
    if isinstance(obj, float):
        return _leaf("float", np.float64(obj).tobytes())
    raise TypeError(
        f"cannot hash a value of type `{type(obj).__name__}`; "
        "give numbers, text, bytes, arrays, images, or lists and dicts of them"
    )


def _exif_image_id(image: Image.Image) -> uuid.UUID | None:
    """Return the UUID that a program gave the picture; malformed EXIF counts as none."""
    try:
        image_id = image.getexif().get(ExifTags.Base.ImageID)
    except Exception:
        return None
    return image_id if isinstance(image_id, uuid.UUID) else None
