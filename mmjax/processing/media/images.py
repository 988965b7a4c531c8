"""One image in any form that the user may give it -> an upright RGB image, or its bytes."""

from pathlib import Path
from typing import Any

from PIL import ExifTags, Image

from mmjax.decoders.image_file import convert_to_rgb
from mmjax.decoders.limits import MediaLimits, check_image_size
from mmjax.errors import RequestError, RequestTypeError, RequestValueError
from mmjax.processing.media.decode import (
    MediaWithBytes,
    get_image_id,
    image_from_array,
    is_array_like,
    read_image_path,
    read_image_url,
)
from mmjax.processing.media.encoded import EncodedImage


def parse_image(
    entry: Any, limits: MediaLimits, *, param: str
) -> Image.Image | MediaWithBytes | EncodedImage | None:
    """Return an upright RGB image; one that came encoded stays so, and decodes when used."""
    if entry is None or isinstance(entry, EncodedImage):
        return entry
    if isinstance(entry, MediaWithBytes):
        if isinstance(entry.media, Image.Image):
            check_image_size(entry.media.size, limits, param=param)
            return entry
        entry = entry.media  # an array, or nothing that is an image
    if isinstance(entry, Image.Image):
        check_image_size(entry.size, limits, param=param)
        return _convert(entry, param)
    if isinstance(entry, bytes | bytearray | memoryview):
        return EncodedImage(bytes(entry), limits, param)
    if isinstance(entry, Path):
        return EncodedImage(read_image_path(entry, limits, param=param), limits, param)
    if isinstance(entry, str):
        is_url = "://" in entry[:16] or entry[:5].lower() == "data:"
        if is_url:
            return EncodedImage(read_image_url(entry, limits, param=param), limits, param)
        return EncodedImage(read_image_path(Path(entry), limits, param=param), limits, param)
    if is_array_like(entry):
        return image_from_array(entry, limits, param=param)
    raise RequestTypeError(
        f"{param} has the type `{type(entry).__name__}`; give a PIL image, an array, "
        "bytes, a path or a data URL",
        param=param,
    )


def _convert(image: Image.Image, param: str) -> Image.Image:
    image_id = get_image_id(image)
    try:
        rgb = convert_to_rgb(image)
        if image_id is not None and rgb is not image:
            # Conversion drops what a program wrote beside the pixels: the id goes with them.
            rgb.getexif()[ExifTags.Base.ImageID] = image_id
        return rgb
    except RequestError:
        raise
    # A lazily opened image decodes here, and a truncated one fails here.
    except Exception as error:
        raise RequestValueError(
            f"image cannot be decoded: {error or type(error).__name__}; give a whole image",
            param=param,
        ) from error
