"""Messages of a chat in OpenAI's form, with image files as data URLs."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmjax.decoders.limits import MediaLimits, check_image_bytes
from mmjax.errors import ConfigError, RequestError

_MEDIA_TYPES = {".gif": "gif", ".jpeg": "jpeg", ".jpg": "jpeg", ".png": "png", ".webp": "webp"}
"""Media type by suffix; what a file holds is found out by whoever decodes it."""


LIMITS = MediaLimits()
"""Limits on media for a model in this process."""
NO_LIMITS = MediaLimits(max_image_bytes=2**62, max_image_pixels=2**62)
"""No limits, for a server, which has its own."""


def user_message(
    text: str, images: Sequence[str] = (), limits: MediaLimits = LIMITS
) -> dict[str, Any]:
    """Return a user's message: images (files or URLs), then the text.

    ConfigError for a file that cannot be read, is no image, or is above the limits.
    """
    if not images:
        return {"role": "user", "content": text}
    urls = [_to_url(image, limits) for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _to_url(image: str, limits: MediaLimits) -> str:
    if image.startswith(("data:", "http://", "https://")):
        return image
    path = Path(image).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the image {image} cannot be read ({error.strerror})") from error
    # Imported here: Pillow is slow, and URLs do without.
    from mmjax.decoders.image_file import read_image_header

    try:
        check_image_bytes(len(data), limits)
        read_image_header(data, limits)
    except RequestError as error:
        raise ConfigError(f"the image {image} cannot be used: {error}") from error
    return to_data_url(data, _MEDIA_TYPES.get(path.suffix.lower(), "png"))


def to_data_url(data: bytes, media_type: str) -> str:
    """Return an encoded image as a data URL; `media_type`: as "png"."""
    return f"data:image/{media_type};base64,{base64.b64encode(data).decode()}"
