"""What the user gives for an image (a file's bytes, a path, a data URL, an array) -> the image.

Knows nothing of the network: `http:` and `file:` URLs are refused here.
"""

import base64
import binascii
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from PIL import ExifTags, Image

from mmjax.decoders.image_file import convert_to_rgb
from mmjax.decoders.limits import MediaLimits, check_image_size
from mmjax.errors import MediaError, RequestTypeError, RequestValueError

_BASE64_PIECE = 2**18
"""In characters, a multiple of four: some 3 ms."""

T = TypeVar("T")
R = TypeVar("R")

CHANNELS = (1, 3, 4)
"""How many an image, or a frame, may have."""

FILES = bytes | bytearray | memoryview | str | Path
"""What a file may be given as; a str is a path or a `data:` URL."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaWithBytes:
    """A decoded medium together with the bytes that it came from; behaves like the medium."""

    media: Any
    original_bytes: bytes
    io_config: Mapping[str, Any] | None = None
    """How decoding altered the pixels (mode, background); None where it did not."""

    def __getattr__(self, name: str) -> Any:
        if name in ("media", "original_bytes", "io_config"):  # not yet set: do not recurse
            raise AttributeError(name)
        return getattr(self.media, name)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self.media, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.media)

    def __getitem__(self, index: Any) -> Any:
        return self.media[index]


def is_array_like(obj: object) -> bool:
    """Return whether `obj` is an array of any library; imports none of them."""
    return hasattr(obj, "__array__") and hasattr(obj, "shape") and hasattr(obj, "dtype")


def as_numpy(array: Any) -> np.ndarray:
    """Return an array of any library as numpy, in place where its library allows that."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):
        return _torch_as_numpy(array)
    return np.asarray(array)


def _torch_as_numpy(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    dtype = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None)
    if dtype is None:
        return np.asarray(tensor)
    # numpy does not know the dtype (bfloat16, float8): its bits cross over as integers.
    torch = sys.modules["torch"]
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    return np.asarray(bits).view(dtype)


def read_media(entry: Any, limits: MediaLimits, *, param: str, modality: str) -> bytes:
    """Return the content of a file that is given as one of `FILES`.

    For callers in this process, never for clients' strings.
    """
    if isinstance(entry, bytes | bytearray | memoryview):
        return bytes(entry)
    if isinstance(entry, str) and ("://" in entry[:16] or entry[:5].lower() == "data:"):
        return _read_url(entry, limits, param, modality)
    return _read_path(Path(entry), limits, param, modality)


def _read_path(path: Path, limits: MediaLimits, param: str, modality: str) -> bytes:
    try:
        size, max_bytes = path.stat().st_size, limits.max_bytes(modality)
        if size > max_bytes:
            raise RequestValueError(
                f"{modality} file `{path}` has {size} bytes, at most {max_bytes} are "
                "accepted; give a smaller file",
                param=param,
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, RequestValueError):
            raise
        raise RequestValueError(
            f"{modality} file `{path}` cannot be read: {error}; give the path of a readable file",
            param=param,
        ) from error


def _read_url(url: str, limits: MediaLimits, param: str, modality: str) -> bytes:
    scheme = url.partition(":")[0].lower()
    if scheme in ("http", "https", "file"):
        raise RequestValueError(
            f"`{scheme}:` URLs are fetched for messages alone (`{modality}_url` parts); "
            f"give the {modality} itself, or its path",
            param=param,
        )
    if scheme != "data":
        raise RequestValueError(
            f"media URL starts with {url[:16]!r}; "
            "it must be a base64 `data:` URL, such as `data:image/png;base64,...`",
            param=param,
        )
    return decode_data_url(url, limits, param=param, modality=modality)


def decode_data_url(url: str, limits: MediaLimits, *, param: str | None, modality: str) -> bytes:
    """Return the payload of a base64 `data:` URL; strict in what it accepts."""
    start = find_payload(url, param)
    num_chars = len(url) - start
    max_bytes = limits.max_bytes(modality)
    if num_chars // 4 * 3 - 2 > max_bytes:
        raise RequestValueError(
            f"{modality} has about {num_chars // 4 * 3} encoded bytes, at most {max_bytes} are "
            "accepted; send a smaller file",
            param=param,
        )
    return decode_payload(url, start, param)


def find_payload(url: str, param: str | None) -> int:
    """Return where the payload of a base64 `data:` URL begins."""
    start = url.find(",") + 1
    if not start:
        raise RequestValueError(
            "data URL is missing ',' between its header and its payload; "
            "write `data:image/png;base64,...`",
            param=param,
        )
    header = url[len("data:") : start - 1]
    if not header.endswith(";base64"):
        raise RequestValueError(
            f"data URL has the header {header[:64]!r}; only base64 payloads are accepted: "
            "write `data:image/png;base64,...`",
            param=param,
        )
    return start


def decode_payload(text: str, start: int, param: str | None) -> bytes:
    """Decode `text[start:]`; MediaError where it is no base64."""
    try:
        return decode_base64(text, start)
    except (binascii.Error, ValueError) as error:
        raise MediaError(
            f"data URL holds invalid base64: {error}; encode the file's bytes with standard base64",
            param=param,
        ) from error


def decode_base64(text: str, start: int = 0) -> bytes:
    """Decode `text[start:]`, strictly, in pieces: no other thread runs during one.

    ValueError (`binascii.Error` is one) where it is no base64.
    """
    if text.find("\n", start) >= 0:
        raise ValueError("it is several lines, and must be one (`base64 -w0`)")
    padding = text.find("=", start)
    if padding >= 0 and padding < len(text) - 2:
        raise ValueError("Excess data after padding")
    return b"".join(
        base64.b64decode(text[place : place + _BASE64_PIECE], validate=True)
        for place in range(start, len(text), _BASE64_PIECE)
    )


def has_parsed_exif(image: Image.Image) -> bool:
    """Return whether somebody has asked for the image's EXIF; True where Pillow does not tell.

    Pillow keeps that in a private attribute, which is read here alone.
    """
    return getattr(image, "_exif", image) is not None


def get_image_id(image: Image.Image) -> uuid.UUID | None:
    """Return the UUID that a program gave the image; malformed EXIF counts as none."""
    # No file holds such an object: it can only stand in a table that was asked for before.
    if not has_parsed_exif(image):
        return None
    try:
        image_id = image.getexif().get(ExifTags.Base.ImageID)
    except Exception:
        return None
    return image_id if isinstance(image_id, uuid.UUID) else None


def image_from_array(
    array: Any, limits: MediaLimits, *, param: str | None = "image"
) -> Image.Image:
    """Return an `[H, W, C]` or `[C, H, W]` array (C: 1, 3 or 4) as an RGB image.

    Integers are 0..255; floats are 0..1.
    """
    pixels = as_numpy(array)
    if pixels.ndim != 3 or not {pixels.shape[0], pixels.shape[-1]} & set(CHANNELS):
        raise RequestValueError(
            f"image array has shape {tuple(pixels.shape)}; "
            "it must be (height, width, channels) or (channels, height, width) "
            "with 1, 3 or 4 channels",
            param=param,
        )
    if pixels.shape[-1] not in CHANNELS:
        pixels = np.moveaxis(pixels, 0, -1)
    check_image_size((pixels.shape[1], pixels.shape[0]), limits, param=param)
    pixels = np.ascontiguousarray(_as_uint8(pixels, param))
    return convert_to_rgb(Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels))


def video_as_uint8(frames: Any) -> np.ndarray:
    """Return `frames` as uint8[frames, height, width, 3]: itself where it is that already."""
    pixels = as_numpy(frames)
    if pixels.dtype == np.uint8 and pixels.shape[-1] == 3:
        return pixels
    if pixels.dtype == np.uint8 and pixels.shape[-1] not in CHANNELS and pixels.shape[1] == 3:
        return np.moveaxis(pixels, 1, -1)
    no_limits = MediaLimits(max_image_pixels=max(1, math.prod(pixels.shape)))
    images = (image_from_array(frame, no_limits) for frame in iter_frames(pixels))
    return np.stack([np.asarray(image) for image in images])


def iter_frames(pixels: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a video's frames as `image_from_array` takes them.

    Floats may be 0..255, too: torchvision's `resize(...).float()`, of which qwen-vl-utils makes
    its videos. The whole video tells: a dark frame may have nothing above 1.
    """
    in_bytes = False
    if _is_float(pixels) and pixels.size:
        in_bytes = float(pixels.min()) >= 0 and 1 < float(pixels.max()) <= 255
    yield from (frame.astype(np.float32) / 255 for frame in pixels) if in_bytes else pixels


def _is_float(pixels: np.ndarray) -> bool:
    return pixels.dtype.kind == "f" or pixels.dtype.name == "bfloat16"


def _as_uint8(pixels: np.ndarray, param: str | None) -> np.ndarray:
    if pixels.dtype == np.uint8:
        return pixels
    is_float = _is_float(pixels)
    if not is_float and pixels.dtype.kind not in "iu":
        raise RequestTypeError(
            f"image array has dtype {pixels.dtype}; it must be uint8 (0..255) or float (0..1)",
            param=param,
        )
    scaled = pixels.astype(np.float32) * 255 if is_float else pixels
    low, high = scaled.min(), scaled.max()
    if not (low >= 0 and high <= 255):  # NaN fails too
        bound = "0..1 for floats" if is_float else "0..255 for integers"
        raise RequestValueError(
            f"image array of dtype {pixels.dtype} has values from {pixels.min()} to "
            f"{pixels.max()}; they must lie in {bound}",
            param=param,
        )
    return np.rint(scaled).astype(np.uint8) if is_float else scaled.astype(np.uint8)


def map_in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return what a function makes of each item, in order; what the first to fail raises.

    Side by side: Pillow's decoders and filters let other threads run.
    """
    listed = list(items)
    num_threads = min(len(listed), os.cpu_count() or 1)
    if num_threads < 2:
        return [function(item) for item in listed]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="mmjax-image") as pool:
        return list(pool.map(function, listed))
