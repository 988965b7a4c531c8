"""An image's file -> what its header says, and its first frame, upright in RGB. Pillow's part.

Runs in threads of the server and of `LLM`, and in the decoding processes: it loads little.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps

from mmjax.decoders.limits import MediaLimits, check_bytes, check_image_size
from mmjax.errors import MediaError, RequestValueError
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that may be decoded; Pillow knows more, and some of them start other programs."""

BYTES_PER_PIXEL = 4
"""What a decoded pixel takes: Pillow pads RGB to four bytes."""

_WHITE = (255, 255, 255)
_SIDEWAYS = (5, 6, 7, 8)
"""Orientations whose upright image has its sides swapped."""
_PNG_EXIF = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
"""Chunks of a PNG that may have an orientation."""
_TIFF_TILE_WIDTH, _TIFF_TILE_LENGTH = 322, 323


class ImageHeader(NamedTuple):
    """What a file says of its image before the pixels are decoded."""

    width: int
    height: int
    has_transparency: bool
    is_turned: bool | None
    """Whether the upright image has its sides swapped; None where its pixels are needed to tell."""

    @property
    def upright_size(self) -> tuple[int, int] | None:
        """The width and height of the upright image; None where the pixels tell."""
        if self.is_turned is None:
            return None
        return (self.height, self.width) if self.is_turned else (self.width, self.height)

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


def decode_image(
    data: bytes, limits: MediaLimits, *, param: str | None = "image"
) -> tuple[Image.Image, ImageHeader]:
    """Decode an image's first frame to upright RGB, transparency composited on white.

    JPEGs are decoded whole, too: what `Image.draft` gives is scaled by another filter than the
    HF processors', so the pixels would differ.
    """
    check_bytes("image", len(data), limits, param=param)
    with _named_faults(len(data), limits, param):
        image, header = _open_image(data, limits, param)
        return convert_to_rgb(image), header


def _open_image(
    data: bytes, limits: MediaLimits, param: str | None
) -> tuple[Image.Image, ImageHeader]:
    """Read the header, and hold it to the limits; no pixel is decoded."""
    try:
        image = Image.open(BytesIO(data), formats=IMAGE_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        # Raised before the size is told, which the file's plugin has read by then.
        check_image_size(_read_size(data), limits, param=param)
        raise
    check_image_size(image.size, limits, param=param)
    tags = getattr(image, "tag_v2", None)
    if tags is not None:  # TIFF decodes tile by tile, and one may be larger than the image
        tile = (tags.get(_TIFF_TILE_WIDTH, 1), tags.get(_TIFF_TILE_LENGTH, 1))
        check_image_size(tile, limits, param=param)
    return image, ImageHeader(*image.size, _has_transparency(image), _is_turned(image, data))


def _is_turned(image: Image.Image, data: bytes) -> bool | None:
    # Pillow turns some TIFFs while it decodes, and decodes a PNG to find EXIF behind its pixels.
    if image.format == "TIFF":
        return None
    if image.format == "PNG":
        return None if any(name in data for name in _PNG_EXIF) else False
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1) in _SIDEWAYS
    except Exception:  # as `_turn_upright`
        return False


def _read_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) as Pillow's plugin for the file's format reads it."""
    for name in IMAGE_FORMATS:
        make, accepts = Image.OPEN[name]
        if accepts is not None and accepts(data[:16]) is True:
            return make(BytesIO(data), "").size
    raise Image.UnidentifiedImageError("its format is not recognised")


@contextmanager
def _named_faults(num_bytes: int, limits: MediaLimits, param: str | None) -> Iterator[None]:
    """Turn whatever Pillow raises over a file into the request's error."""
    try:
        yield
    except RequestValueError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestValueError(
            f"image is too large ({error}); at most {limits.max_image_pixels} pixels are accepted: "
            "scale it down",
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


def convert_to_rgb(image: Image.Image) -> Image.Image:
    """Return the image upright, in RGB, with transparency composited on white.

    An image that is upright RGB already is returned as it is (its EXIF id stays with it).
    """
    image.load()  # first: Pillow turns some TIFFs upright while it decodes
    image = _turn_upright(image)
    if image.mode.startswith("I;16"):
        image = _as_8_bits(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if _has_transparency(image):
        layer = image.convert("RGBA")
        canvas = Image.new("RGBA", layer.size, (*_WHITE, 255))
        return Image.alpha_composite(canvas, layer).convert("RGB")
    return image.convert("RGB")


def _as_8_bits(image: Image.Image) -> Image.Image:
    """Return 16-bit greys in 8 bits, with an alpha channel where one grey is transparent."""
    # Pillow clips them: scale them instead, or an image turns white.
    pixels = np.asarray(image)
    greys = Image.fromarray((pixels >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is None:
        return greys
    alpha = np.where(pixels == transparent, 0, 255).astype(np.uint8)
    return Image.merge("LA", (greys, Image.fromarray(alpha)))


def _turn_upright(image: Image.Image) -> Image.Image:
    try:
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            return ImageOps.exif_transpose(image)
    # Malformed EXIF raises whatever its parser stumbles on; the image itself may be sound.
    except Exception:
        logger.warning("an image's EXIF is malformed; it is taken as upright")
    return image


def _has_transparency(image: Image.Image) -> bool:
    if image.mode == "P" and image.palette is not None and image.palette.mode == "RGBA":
        return True  # as `quantize` makes it of RGBA
    return image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info
