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
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3
from PIL import Image

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.processing.media.decode import (
    MediaWithBytes,
    as_numpy,
    get_image_id,
    is_array_like,
)
from mmjax.processing.media.encoded import (
    EncodedAudio,
    EncodedFrames,
    EncodedImage,
    EncodedMedia,
    EncodedVideo,
)

Chunk = bytes | memoryview
NewHash = Callable[..., Any]

LARGE_CHUNK = 4096
"""In bytes; below it, an update of its own costs more than copying."""

_MAX_SMALL_CHUNKS = 4096
"""Small chunks are joined, up to this many, for one update."""

_NONE, _SEQUENCE, _MAPPING, _LEAF = b"\x00", b"\x01", b"\x02", b"\x03"

_SCALARS = frozenset((str, bytes, bool, int, float))
"""Told apart first: most values are of these very types."""


# blake3 could use several threads, but loses by that below 8 MiB and wins nothing on a busy
# machine: requests are hashed in threads of their own.
_ALGORITHMS: Mapping[str, NewHash] = {
    "blake3": blake3,
    "sha256": hashlib.sha256,
    "sha512": hashlib.sha512,
}


@dataclass(frozen=True, slots=True)
class _Content:
    """The bytes of a file that knows their digest: a new item's name takes it several times."""

    media: EncodedMedia[Any]


class _Stream:
    """The stream as it is."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def write(self, data: Chunk, digest: Callable[[NewHash], bytes] | None = None) -> None:
        """Add a frame: the length of `data`, and `data`; `digest` gives that of `data`."""
        self.chunks.append(len(data).to_bytes(8, "little"))
        self.chunks.append(data)


class _HashedStream(_Stream):
    """The stream on its way into a hash; holds no more than its small chunks."""

    def __init__(self, new_hash: NewHash) -> None:
        super().__init__()
        self._new_hash = new_hash
        self._total: Any = None

    def write(self, data: Chunk, digest: Callable[[NewHash], bytes] | None = None) -> None:
        """Add a frame; a large chunk by its digest, at once."""
        size = len(data)
        self.chunks.append(size.to_bytes(8, "little"))
        if size >= LARGE_CHUNK:
            data = digest(self._new_hash) if digest else self._new_hash(data).digest()
        self.chunks.append(data)
        if len(self.chunks) >= _MAX_SMALL_CHUNKS:
            self._flush()

    def hexdigest(self) -> str:
        return self._flush().hexdigest()

    def _flush(self) -> Any:
        data = b"".join(self.chunks)
        self.chunks.clear()
        if self._total is None:
            self._total = self._new_hash(data)
        else:
            self._total.update(data)
        return self._total


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
        stream = _HashedStream(self._new_hash)
        try:
            for key in sorted(kwargs):
                self._write_item(stream, key, kwargs[key])
        except RecursionError as error:
            raise RequestValueError(
                "cannot hash a value that is nested this deep, or that holds itself; flatten it"
            ) from error
        return stream.hexdigest()

    def digest_file(self, media: EncodedMedia[Any]) -> bytes:
        """Return the digest of a file's content alone."""
        return media.digest(self._new_hash)

    def digest_bytes(self, data: Chunk) -> bytes:
        """Return the digest of `data` alone, without tag or frame."""
        return self._new_hash(data).digest()

    @classmethod
    def serialize_item(cls, obj: object) -> bytes:
        """Return the stream of one value, for tests and for debugging."""
        return b"".join(cls.iter_value_to_bytes(obj))

    @classmethod
    def iter_item_to_bytes(cls, key: str, obj: object) -> Iterator[Chunk]:
        """Yield the stream of one named value; large payloads as views."""
        stream = _Stream()
        cls._write_item(stream, key, obj)
        return iter(stream.chunks)

    @classmethod
    def iter_value_to_bytes(cls, obj: object) -> Iterator[Chunk]:
        """Yield the stream of one value: scalar, bytes, array, image, sequence or mapping."""
        stream = _Stream()
        cls._write_value(stream, obj)
        return iter(stream.chunks)

    @classmethod
    def get_image_id(cls, image: Image.Image) -> uuid.UUID | None:
        """Return the UUID that a program gave the image; malformed EXIF counts as none."""
        return get_image_id(image)

    @classmethod
    def _write_item(cls, stream: _Stream, key: str, obj: object) -> None:
        stream.write(_LEAF + b"str")
        stream.write(_encode(key))
        cls._write_value(stream, obj)

    @classmethod
    def _write_value(cls, stream: _Stream, obj: object) -> None:
        if obj is None:
            stream.write(_NONE)
        elif type(obj) in _SCALARS:
            _write_scalar(stream, obj)
        elif isinstance(obj, list | tuple):
            stream.write(_SEQUENCE + len(obj).to_bytes(8, "little"))
            for value in obj:
                cls._write_value(stream, value)
        elif isinstance(obj, MediaWithBytes):
            cls._write_media(stream, obj)
        elif isinstance(obj, EncodedImage | EncodedVideo | EncodedAudio):
            # The header says all: an image whose tensors are cached is never decoded.
            cls._write_file(stream, _Content(obj), obj.io_config)
        elif isinstance(obj, _Content):
            stream.write(_LEAF + b"bytes")
            stream.write(obj.media.original_bytes, obj.media.digest)
        elif isinstance(obj, EncodedFrames):
            known = obj.frames if obj.fps is None else (obj.frames, obj.fps)
            cls._write_item(stream, "frames", known)
        elif isinstance(obj, Mapping):
            cls._write_mapping(stream, obj)
        elif isinstance(obj, Image.Image):
            cls._write_image(stream, obj)
        elif is_array_like(obj):
            _write_array(stream, obj)
        else:
            _write_scalar(stream, obj)

    @classmethod
    def _write_mapping(cls, stream: _Stream, obj: Mapping[Any, Any]) -> None:
        stream.write(_MAPPING + len(obj).to_bytes(8, "little"))
        for key, value in obj.items():
            if not isinstance(key, str):
                raise RequestTypeError(
                    f"cannot hash a mapping with the key {key!r}; keys must be str"
                )
            cls._write_item(stream, key, value)

    @classmethod
    def _write_media(cls, stream: _Stream, obj: MediaWithBytes) -> None:
        if isinstance(obj.media, Image.Image):
            image_id = cls.get_image_id(obj.media)
            if image_id is not None:
                cls._write_value(stream, image_id.bytes)
                return
        elif is_array_like(obj.media) and as_numpy(obj.media).nbytes < len(obj.original_bytes):
            # Decoded frames may be fewer than the file holds: they are then the content.
            _write_array(stream, obj.media)
            return
        cls._write_file(stream, obj.original_bytes, obj.io_config)

    @classmethod
    def _write_file(
        cls, stream: _Stream, data: bytes | _Content, io_config: Mapping[str, Any] | None
    ) -> None:
        # One that is empty alters nothing, as None does.
        content = {"io_config": io_config, "data": data} if io_config else data
        cls._write_item(stream, "image", content)

    @classmethod
    def _write_image(cls, stream: _Stream, image: Image.Image) -> None:
        image_id = cls.get_image_id(image)
        if image_id is not None:
            cls._write_value(stream, image_id.bytes)
            return
        # Pixels first: a palette is settled only when they are loaded.
        parts: dict[str, object] = {"mode": image.mode, "data": np.asarray(image)}
        if image.palette is not None:
            parts["palette"] = bytes(image.palette.palette)
            parts["palette_mode"] = image.palette.mode
            parts["palette_rawmode"] = image.palette.rawmode
        if "transparency" in image.info:
            parts["transparency"] = image.info["transparency"]
        cls._write_item(stream, "image", parts)


class ContentHasher(MultiModalHasher):
    """Takes no id that an image carries for its identity: clients write there what they like."""

    @classmethod
    def get_image_id(cls, image: Image.Image) -> uuid.UUID | None:
        """Return None."""
        return None


def _write_array(stream: _Stream, obj: Any) -> None:
    array = _to_plain_array(obj)
    stream.write(_LEAF + b"ndarray")
    facts = [str(array.dtype), array.dtype.byteorder, list(array.shape)]
    MultiModalHasher._write_value(stream, facts)
    # A view where the array is contiguous, however large it is.
    stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


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


def _write_scalar(stream: _Stream, obj: object) -> None:
    kind, data = _scalar_bytes(obj)
    stream.write(_LEAF + kind)
    stream.write(data)


def _scalar_bytes(obj: object) -> tuple[bytes, Chunk]:
    """Return a leaf's tag, and its bytes."""
    if isinstance(obj, str):
        return b"str", _encode(obj)
    if isinstance(obj, bytes):
        return b"bytes", obj
    if isinstance(obj, bytearray | memoryview):
        return b"bytes", _raw_bytes(memoryview(obj))
    if isinstance(obj, bool):
        return b"bool", b"\x01" if obj else b"\x00"
    if isinstance(obj, int):
        size = max(8, obj.bit_length() // 8 + 1)
        return b"int", obj.to_bytes(size, "little", signed=True)
    if isinstance(obj, float):
        return b"float", struct.pack("<d", obj)
    raise RequestTypeError(
        f"cannot hash a value of type `{type(obj).__name__}`; "
        "give numbers, text, bytes, arrays, images, or lists and dicts of them"
    )


def _raw_bytes(view: memoryview) -> Chunk:
    # A view without elements cannot be cast.
    return view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
