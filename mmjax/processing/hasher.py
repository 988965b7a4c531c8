"""Content hashes of items: the same content, model and processor kwargs give the same hex string.

The byte stream is framed (every chunk is preceded by its length) and typed (every value is
preceded by a tag), so that two different inputs never write the same stream. A chunk of
`LARGE_CHUNK` bytes or more enters the hash by its own digest, which its length gives away: large
payloads are hashed in one call, in place and aligned, whatever stands before them.
"""

import hashlib
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from PIL import ExifTags, Image

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.processing.encoded import EncodedImage
from mmjax.processing.media import MediaWithBytes, as_numpy, is_array_like

Chunk = bytes | memoryview

LARGE_CHUNK = 4096
"""In bytes; below it, an update of its own costs more than copying."""

_MAX_SMALL_CHUNKS = 4096
"""Small chunks are joined, up to this many, for one update."""

_NONE, _SEQUENCE, _MAPPING, _LEAF = b"\x00", b"\x01", b"\x02", b"\x03"


class _Hash(Protocol):
    def update(self, data: Chunk, /) -> Any: ...
    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


# blake3 could use several threads, but loses by that below 8 MiB and wins nothing on a busy
# machine: requests are hashed in threads of their own.
_ALGORITHMS: Mapping[str, Callable[..., _Hash]] = {
    "blake3": blake3,
    "sha256": hashlib.sha256,
    "sha512": hashlib.sha512,
}


class MultiModalHasher:
    """Hashes keyword arguments of the types that items and processor kwargs are made of."""

    def __init__(self, algorithm: str = "blake3") -> None:
        if algorithm not in _ALGORITHMS:
            known = ", ".join(f"`{name}`" for name in _ALGORITHMS)
            raise ValueError(f"hash algorithm `{algorithm}` is unknown; choose one of {known}")
        self.algorithm = algorithm
        self._new_hash = _ALGORITHMS[algorithm]

    def hash_kwargs(self, **kwargs: object) -> str:
        """Return the hex digest; the order of the arguments does not matter, a dict's does."""
        total = self._new_hash()
        small: list[Chunk] = []
        try:
            for key in sorted(kwargs):
                for chunk in self.iter_item_to_bytes(key, kwargs[key]):
                    small.append(chunk if len(chunk) < LARGE_CHUNK else self.digest_bytes(chunk))
                    if len(small) >= _MAX_SMALL_CHUNKS:
                        total.update(b"".join(small))
                        small.clear()
        except RecursionError as error:
            raise RequestValueError(
                "cannot hash a value that is nested this deep, or that holds itself; flatten it"
            ) from error
        total.update(b"".join(small))
        return total.hexdigest()

    def digest_bytes(self, data: Chunk) -> bytes:
        """Return the digest of `data` alone, without tag or frame."""
        return self._new_hash(data).digest()

    @classmethod
    def serialize_item(cls, obj: object) -> bytes:
        """Return the stream of one value, for tests and for debugging."""
        return b"".join(cls.iter_value_to_bytes(obj))

    @classmethod
    def iter_item_to_bytes(cls, key: str, obj: object) -> Iterator[Chunk]:
        """Yield the stream of one named value."""
        yield from _leaf("str", _encode(key))
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
            yield from cls._iter_mapping(obj)
        elif isinstance(obj, EncodedImage):
            yield from cls._iter_media(obj.decode())
        elif isinstance(obj, MediaWithBytes):
            yield from cls._iter_media(obj)
        elif isinstance(obj, Image.Image):
            yield from cls._iter_image(obj)
        elif is_array_like(obj):
            yield from cls._iter_array(obj)
        else:
            yield from _iter_scalar(obj)

    @classmethod
    def get_image_id(cls, image: Image.Image) -> uuid.UUID | None:
        """Return the UUID that a program gave the picture; malformed EXIF counts as none."""
        try:
            image_id = image.getexif().get(ExifTags.Base.ImageID)
        except Exception:
            return None
        return image_id if isinstance(image_id, uuid.UUID) else None

    @classmethod
    def _iter_mapping(cls, obj: Mapping[Any, Any]) -> Iterator[Chunk]:
        yield from _frame(_MAPPING + len(obj).to_bytes(8, "little"))
        for key, value in obj.items():
            if not isinstance(key, str):
                raise RequestTypeError(
                    f"cannot hash a mapping with the key {key!r}; keys must be str"
                )
            yield from cls.iter_item_to_bytes(key, value)

    @classmethod
    def _iter_media(cls, obj: MediaWithBytes) -> Iterator[Chunk]:
        if isinstance(obj.media, Image.Image):
            image_id = cls.get_image_id(obj.media)
            if image_id is not None:
                yield from _leaf("bytes", image_id.bytes)
                return
        elif is_array_like(obj.media) and as_numpy(obj.media).nbytes < len(obj.original_bytes):
            # Decoded frames may be fewer than the file holds: they are then the content.
            yield from cls._iter_array(obj.media)
            return
        if obj.io_config is None:
            yield from cls.iter_item_to_bytes("image", obj.original_bytes)
        else:
            parts = {"io_config": obj.io_config, "data": obj.original_bytes}
            yield from cls.iter_item_to_bytes("image", parts)

    @classmethod
    def _iter_image(cls, image: Image.Image) -> Iterator[Chunk]:
        image_id = cls.get_image_id(image)
        if image_id is not None:
            yield from _leaf("bytes", image_id.bytes)
            return
        # Pixels first: a palette is settled only when they are loaded.
        parts: dict[str, object] = {"mode": image.mode, "data": np.asarray(image)}
        if image.palette is not None:
            parts["palette"] = bytes(image.palette.palette)
            parts["palette_mode"] = image.palette.mode
            parts["palette_rawmode"] = image.palette.rawmode
        if "transparency" in image.info:
            parts["transparency"] = image.info["transparency"]
        yield from cls.iter_item_to_bytes("image", parts)

    @classmethod
    def _iter_array(cls, obj: Any) -> Iterator[Chunk]:
        array = _to_plain_array(obj)
        yield from _frame(_LEAF + b"ndarray")
        yield from cls.iter_value_to_bytes(
            [str(array.dtype), array.dtype.byteorder, list(array.shape)]
        )
        # A view where the array is contiguous, however large it is.
        yield from _frame(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


class ContentHasher(MultiModalHasher):
    """Takes no id that a picture carries for its identity: clients write there what they like."""

    @classmethod
    def get_image_id(cls, image: Image.Image) -> uuid.UUID | None:
        """Return None."""
        return None


def _to_plain_array(obj: Any) -> np.ndarray:
    try:
        array = as_numpy(obj)
    # Sparse, quantised and device-less arrays: their libraries raise what they like.
    except Exception as error:
        raise RequestTypeError(
            f"cannot hash an array of type `{type(obj).__name__}`: {error}; give a dense one"
        ) from error
    if array.dtype.hasobject:
        raise RequestTypeError(
            f"cannot hash an array of dtype {array.dtype}; give numbers, or a list"
        )
    if isinstance(array, np.ma.MaskedArray):
        raise RequestTypeError("cannot hash a masked array; fill it, or give the mask beside it")
    return array


def _frame(data: Chunk) -> Iterator[Chunk]:
    yield len(data).to_bytes(8, "little")
    yield data


def _leaf(kind: str, data: Chunk) -> Iterator[Chunk]:
    yield from _frame(_LEAF + kind.encode())
    yield from _frame(data)


def _iter_scalar(obj: object) -> Iterator[Chunk]:
    if isinstance(obj, str):
        return _leaf("str", _encode(obj))
    if isinstance(obj, bytes):
        return _leaf("bytes", obj)
    if isinstance(obj, bytearray | memoryview):
        return _leaf("bytes", _raw_bytes(memoryview(obj)))
    if isinstance(obj, bool):
        return _leaf("bool", b"\x01" if obj else b"\x00")
    if isinstance(obj, int):
        size = max(8, obj.bit_length() // 8 + 1)
        return _leaf("int", obj.to_bytes(size, "little", signed=True))
    if isinstance(obj, float):
        return _leaf("float", struct.pack("<d", obj))
    raise RequestTypeError(
        f"cannot hash a value of type `{type(obj).__name__}`; "
        "give numbers, text, bytes, arrays, images, or lists and dicts of them"
    )


def _raw_bytes(view: memoryview) -> Chunk:
    # A view without elements cannot be cast.
    return view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
