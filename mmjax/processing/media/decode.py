"""Encoded media -> images, with limits that are checked before anything is decoded.

Knows nothing of the network: `http:` and `file:` URLs are refused here.
"""

import base64
import binascii
import math
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from PIL import ExifTags, Image, ImageOps

from mmjax.errors import MediaError, RequestTypeError, RequestValueError
from mmjax.logger import get_logger

logger = get_logger(__name__)

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that may be decoded; Pillow knows more, and some of them start other programs."""

BYTES_PER_PIXEL = 4
"""Of a decoded image: Pillow pads RGB to four bytes."""

_BASE64_PIECE = 2**18
"""In characters, a multiple of four: some 3 ms."""

CHANNELS = (1, 3, 4)
"""How many an image, or a frame, may have."""

_WHITE = (255, 255, 255)
_TIFF_TILE_WIDTH, _TIFF_TILE_LENGTH = 322, 323


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What is refused before it is decoded."""

    max_image_bytes: int = 64 * 2**20
    max_image_pixels: int = 50_000_000
    max_video_frames: int = 2048
    max_video_pixels: int = 500_000_000
    """Over all frames of one video."""
    max_audio_samples: int = 100_000_000
    """Of one item, over all channels, before and after resampling."""


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


class ImageHeader(NamedTuple):
    """What a file says of its image before the pixels are decoded."""

    width: int
    height: int
    has_transparency: bool

    @property
    def num_decoded_bytes(self) -> int:
        """Return the memory that the pixels take once they are decoded."""
        return self.width * self.height * BYTES_PER_PIXEL

    @property
    def io_config(self) -> Mapping[str, Any] | None:
        """Return how decoding alters the pixels; see `MediaWithBytes`."""
        if not self.has_transparency:
            return None
        return {"image_mode": "RGB", "rgba_background_color": _WHITE}


def read_image_header(
    data: bytes, limits: MediaLimits, *, param: str | None = "image"
) -> ImageHeader:
    """Read an image's header alone; refuse what `limits` does, and what is no image."""
    with _named_faults(len(data), limits, param):
        return _open_image(data, limits, param)[1]


def load_image_bytes(
    data: bytes, limits: MediaLimits, *, param: str | None = "image"
) -> MediaWithBytes:
    """Decode an image's first frame to upright RGB, transparency composited on white.

    JPEGs are decoded whole, too: what `Image.draft` gives is scaled by another filter than the
    HF processors', so the pixels would differ.
    """
    check_image_bytes(len(data), limits, param=param)
    with _named_faults(len(data), limits, param):
        image, header = _open_image(data, limits, param)
        return MediaWithBytes(convert_to_rgb(image), bytes(data), header.io_config)


def _open_image(
    data: bytes, limits: MediaLimits, param: str | None
) -> tuple[Image.Image, ImageHeader]:
    """Read the header, and hold it to the limits; no pixel is decoded."""
    image = Image.open(BytesIO(data), formats=IMAGE_FORMATS)
    check_image_size(image.size, limits, param=param)
    tags = getattr(image, "tag_v2", None)
    if tags is not None:  # TIFF decodes tile by tile, and one may be larger than the image
        tile = (tags.get(_TIFF_TILE_WIDTH, 1), tags.get(_TIFF_TILE_LENGTH, 1))
        check_image_size(tile, limits, param=param)
    return image, ImageHeader(*image.size, _has_transparency(image))


@contextmanager
def _named_faults(num_bytes: int, limits: MediaLimits, param: str | None) -> Iterator[None]:
    """Turn whatever Pillow raises over a file into the request's error."""
    try:
        yield
    except RequestValueError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestValueError(
            f"image is too large; at most {limits.max_image_pixels} pixels are accepted: shrink it",
            param=param,
        ) from error
    # Pillow's plugins raise OSError, ValueError, SyntaxError, struct.error, and more.
    except Exception as error:
        formats = ", ".join(IMAGE_FORMATS)
        raise MediaError(
            f"Failed to load image of {num_bytes} bytes: {_reason(error)}; "
            f"send a whole file of one of {formats}",
            param=param,
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "its format is not recognised"
    return str(error) or type(error).__name__


def read_image_path(path: Path, limits: MediaLimits, *, param: str | None = "image") -> bytes:
    """Read a local file; for callers in this process, never for clients' strings."""
    try:
        size = path.stat().st_size
        if size > limits.max_image_bytes:
            raise RequestValueError(
                f"image file `{path}` has {size} bytes, at most {limits.max_image_bytes} are "
                "accepted; give a smaller file",
                param=param,
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, RequestValueError):
            raise
        raise RequestValueError(
            f"image file `{path}` cannot be read: {error}; give the path of a readable file",
            param=param,
        ) from error


def read_image_url(url: str, limits: MediaLimits, *, param: str | None = "image_url") -> bytes:
    """Return what a `data:` URL holds; other schemes are refused. Safe for clients' strings."""
    scheme = url.partition(":")[0].lower()
    if scheme in ("http", "https", "file"):
        raise RequestValueError(
            f"`{scheme}:` URLs are not fetched by this version; "
            "send the image itself as a base64 `data:` URL",
            param=param,
        )
    if scheme != "data":
        raise RequestValueError(
            f"media URL starts with {url[:16]!r}; "
            "it must be a base64 `data:` URL, such as `data:image/png;base64,...`",
            param=param,
        )
    return decode_data_url(url, limits, param=param)


def decode_data_url(url: str, limits: MediaLimits, *, param: str | None = "image_url") -> bytes:
    """Return the payload of a base64 `data:` URL; strict in what it accepts."""
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
    num_chars = len(url) - start
    if num_chars // 4 * 3 - 2 > limits.max_image_bytes:
        raise RequestValueError(
            f"image has about {num_chars // 4 * 3} encoded bytes, at most "
            f"{limits.max_image_bytes} are accepted; send a smaller file",
            param=param,
        )
    try:
        return decode_base64(url, start)
    except (binascii.Error, ValueError) as error:
        raise MediaError(
            f"data URL holds invalid base64: {error}; encode the file's bytes with standard base64",
            param=param,
        ) from error


def decode_base64(text: str, start: int = 0) -> bytes:
    """Decode `text[start:]`, strictly, in pieces: no other thread runs during one.

    ValueError (`binascii.Error` is one) where it is no base64.
    """
    padding = text.find("=", start)
    if padding >= 0 and padding < len(text) - 2:
        raise ValueError("Excess data after padding")
    return b"".join(
        base64.b64decode(text[place : place + _BASE64_PIECE], validate=True)
        for place in range(start, len(text), _BASE64_PIECE)
    )


def check_image_bytes(num_bytes: int, limits: MediaLimits, *, param: str | None = "image") -> None:
    """Refuse a file that is too large to be looked at."""
    if num_bytes > limits.max_image_bytes:
        raise RequestValueError(
            f"image has {num_bytes} encoded bytes, at most {limits.max_image_bytes} are accepted; "
            "send a smaller file",
            param=param,
        )


def check_image_size(
    size: tuple[int, int], limits: MediaLimits, *, param: str | None = "image"
) -> None:
    """Refuse an empty image and one with too many pixels; `size` is (width, height)."""
    width, height = size
    if width < 1 or height < 1:
        raise RequestValueError(
            f"image is {width}x{height} pixels; it must have at least one", param=param
        )
    if width * height > limits.max_image_pixels:
        raise RequestValueError(
            f"image is {width}x{height} = {width * height} pixels, at most "
            f"{limits.max_image_pixels} are accepted; scale it down",
            param=param,
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


def convert_to_rgb(image: Image.Image) -> Image.Image:
    """Return the image upright, in RGB, with transparency composited on white.

    An image that is upright RGB already is returned as it is (its EXIF id stays with it).
    """
    image.load()  # first: Pillow turns some TIFFs upright while it decodes
    image = _turn_upright(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if _has_transparency(image):
        layer = image.convert("RGBA")
        canvas = Image.new("RGBA", layer.size, (*_WHITE, 255))
        return Image.alpha_composite(canvas, layer).convert("RGB")
    if image.mode.startswith("I;16"):
        # Pillow clips 16-bit greys to 8 bits: scale them instead, or an image turns white.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _turn_upright(image: Image.Image) -> Image.Image:
    try:
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            return ImageOps.exif_transpose(image)
    # Malformed EXIF raises whatever its parser stumbles on; the image itself may be sound.
    except Exception:
        logger.warning("an image's EXIF is malformed; it is taken as upright")
    return image


def _has_transparency(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info


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
    return np.stack([np.asarray(image_from_array(frame, no_limits)) for frame in pixels])


def _as_uint8(pixels: np.ndarray, param: str | None) -> np.ndarray:
    if pixels.dtype == np.uint8:
        return pixels
    is_float = pixels.dtype.kind == "f" or pixels.dtype.name == "bfloat16"
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
