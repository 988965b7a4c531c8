"""One picture in any form that the user may give it -> an upright RGB picture."""

from pathlib import Path
from typing import Any

from PIL import Image

from mmjax.errors import RequestError, RequestTypeError, RequestValueError
from mmjax.processing.media import (
    MediaLimits,
    MediaWithBytes,
    check_image_size,
    convert_to_rgb,
    image_from_array,
    is_array_like,
    load_image_bytes,
    load_image_path,
    load_image_url,
)


def parse_image(
    entry: Any, limits: MediaLimits, *, param: str
) -> Image.Image | MediaWithBytes | None:
    """Return an upright RGB picture, with its bytes where it came as bytes."""
    if entry is None:
        return None
    if isinstance(entry, MediaWithBytes):
        check_image_size(entry.media.size, limits, param=param)
        return entry
    if isinstance(entry, Image.Image):
        check_image_size(entry.size, limits, param=param)
        return _convert(entry, param)
    if isinstance(entry, bytes | bytearray | memoryview):
        return load_image_bytes(bytes(entry), limits, param=param)
    if isinstance(entry, Path):
        return load_image_path(entry, limits, param=param)
    if isinstance(entry, str):
        if "://" in entry[:16] or entry[:5].lower() == "data:":
            return load_image_url(entry, limits, param=param)
        return load_image_path(Path(entry), limits, param=param)
    if is_array_like(entry):
        return image_from_array(entry, limits, param=param)
    raise RequestTypeError(
        f"{param} has the type `{type(entry).__name__}`; give a PIL image, an array, "
        "bytes, a path or a data URL",
        param=param,
    )


def _convert(image: Image.Image, param: str) -> Image.Image:
    try:
        return convert_to_rgb(image)
    except RequestError:
        raise
    # A lazily opened picture decodes here, and a truncated one fails here.
    except Exception as error:
        raise RequestValueError(
            f"image cannot be decoded: {error or type(error).__name__}; give a whole picture",
            param=param,
        ) from error
