"""Messages of a chat in OpenAI's form, with the files of images and clips as data URLs."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mmjax.decoders.limits import MediaLimits, check_bytes
from mmjax.errors import ConfigError, RequestError

_IMAGE_TYPES = {".gif": "gif", ".jpeg": "jpeg", ".jpg": "jpeg", ".png": "png", ".webp": "webp"}
"""Media type by suffix; what a file holds is found out by whoever decodes it."""


LIMITS = MediaLimits()
"""Limits on media for a model in this process."""
NO_LIMITS = MediaLimits(
    max_image_bytes=2**62,
    max_image_pixels=2**62,
    max_audio_bytes=2**62,
    max_audio_seconds=2**62,
    max_audio_rate=2**31,
    max_audio_channels=2**16,
    max_audio_samples=2**62,
)
"""No limits, for a server, which has its own."""


def user_message(
    text: str,
    images: Sequence[str] = (),
    limits: MediaLimits = LIMITS,
    *,
    clips: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a user's message: images and clips (files or URLs), then the text.

    ConfigError for a file that cannot be read, is no image or no clip, or is above the limits.
    """
    if not images and not clips:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = []
    for image in images:
        parts.append({"type": "image_url", "image_url": {"url": _to_url(image, "image", limits)}})
    for clip in clips:
        parts.append({"type": "audio_url", "audio_url": {"url": _to_url(clip, "clip", limits)}})
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _to_url(name: str, kind: Literal["image", "clip"], limits: MediaLimits) -> str:
    """Return a file as a data URL; what is a URL stays as it is."""
    if name.startswith(("data:", "http://", "https://")):
        return name
    path = Path(name).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the {kind} {name} cannot be read ({error.strerror})") from error
    # Imported here: Pillow and numpy are slow, and URLs do without.
    from mmjax.decoders.audio_file import read_audio_header
    from mmjax.decoders.image_file import read_image_header

    suffix = path.suffix.lower()
    try:
        if kind == "image":
            check_bytes("image", len(data), limits, param=None)
            read_image_header(data, limits)
            return to_data_url(data, f"image/{_IMAGE_TYPES.get(suffix, 'png')}")
        check_bytes("audio", len(data), limits, param=None)
        read_audio_header(data, limits)
        return to_data_url(data, f"audio/{suffix.lstrip('.') or 'wav'}")
    except RequestError as error:
        raise ConfigError(f"the {kind} {name} cannot be used: {error}") from error


def to_data_url(data: bytes, media_type: str) -> str:
    """Return a file as a data URL; `media_type`: as "image/png"."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
