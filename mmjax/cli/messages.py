"""Messages of a chat in OpenAI's form, with the files of images and clips as data URLs."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        parts.append({"type": "image_url", "image_url": {"url": _to_image_url(image, limits)}})
    for clip in clips:
        parts.append({"type": "audio_url", "audio_url": {"url": _to_audio_url(clip, limits)}})
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _read(name: str, kind: str) -> tuple[bytes, Path] | None:
    """Return a file's content and its path; None for a URL."""
    if name.startswith(("data:", "http://", "https://")):
        return None
    path = Path(name).expanduser()
    try:
        return path.read_bytes(), path
    except OSError as error:
        raise ConfigError(f"the {kind} {name} cannot be read ({error.strerror})") from error


def _to_audio_url(clip: str, limits: MediaLimits) -> str:
    if (file := _read(clip, "clip")) is None:
        return clip
    data, path = file
    # Imported here: numpy is slow, and URLs do without.
    from mmjax.decoders.audio_file import read_audio_header

    try:
        check_bytes("audio", len(data), limits, param=None)
        read_audio_header(data, limits)
    except RequestError as error:
        raise ConfigError(f"the clip {clip} cannot be used: {error}") from error
    kind = path.suffix.lower().lstrip(".") or "wav"
    return f"data:audio/{kind};base64,{base64.b64encode(data).decode()}"


def _to_image_url(image: str, limits: MediaLimits) -> str:
    if (file := _read(image, "image")) is None:
        return image
    data, path = file
    # Imported here: Pillow is slow, and URLs do without.
    from mmjax.decoders.image_file import read_image_header

    try:
        check_bytes("image", len(data), limits, param=None)
        read_image_header(data, limits)
    except RequestError as error:
        raise ConfigError(f"the image {image} cannot be used: {error}") from error
    return to_data_url(data, _IMAGE_TYPES.get(path.suffix.lower(), "png"))


def to_data_url(data: bytes, media_type: str) -> str:
    """Return an encoded image as a data URL; `media_type`: as "png"."""
    return f"data:image/{media_type};base64,{base64.b64encode(data).decode()}"
