"""Messages of a chat in OpenAI's form, with image files as data URLs."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmjax.errors import ConfigError

_MEDIA_TYPES = {".gif": "gif", ".jpeg": "jpeg", ".jpg": "jpeg", ".png": "png", ".webp": "webp"}
"""By suffix; what a file holds is found out by whoever decodes it."""


def user_message(text: str, images: Sequence[str] = ()) -> dict[str, Any]:
    """Return a user's message: images (files or URLs), then the text."""
    if not images:
        return {"role": "user", "content": text}
    parts = [{"type": "image_url", "image_url": {"url": _to_url(image)}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _to_url(image: str) -> str:
    if image.startswith(("data:", "http://", "https://")):
        return image
    path = Path(image).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the image {image} cannot be read ({error.strerror})") from error
    return to_data_url(data, _MEDIA_TYPES.get(path.suffix.lower(), "png"))


def to_data_url(data: bytes, media_type: str) -> str:
    """Return an encoded image as a data URL; `media_type`: as "png"."""
    return f"data:image/{media_type};base64,{base64.b64encode(data).decode()}"
