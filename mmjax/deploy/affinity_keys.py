"""The keys of a request by which it finds a replica that knows its pictures or its conversation.

Reads what it can, and checks nothing: the replica answers what is wrong with a request.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from blake3 import blake3

SESSION_HEADER = "x-session-id"
SESSION_FIELDS = ("prompt_cache_key", "session_id", "previous_response_id")
"""Fields of a body that name a conversation, the most telling first."""

MAX_KEYS = 64
_MAX_VALUE_CHARS = 512
_FIELD_BY_TYPE = {
    "image_url": "image_url",
    "input_image": "image_url",
    "image_embeds": "image_embeds",
    "video_url": "video_url",
}
"""The field of a part with its medium, by the part's type."""


def affinity_keys(headers: Mapping[str, str], body: bytes) -> list[str]:
    """Return a request's keys, the most telling first: session, media, opening, user.

    A medium's key is the hash of all its bytes as they came, or its address, or the id that it
    is claimed to have. Takes time in proportion to the body.
    """
    fields = _decode(body)
    keys = [session_key(headers.get(SESSION_HEADER))]
    keys += [session_key(fields.get(name)) for name in SESSION_FIELDS]
    messages = list(_messages(fields))
    keys += [key for message in messages for key in _media_keys(message)]
    keys += [_opening_key(messages), _named("user", fields.get("user"))]
    return list(dict.fromkeys(key for key in keys if key is not None))[:MAX_KEYS]


def session_key(session: Any) -> str | None:
    """Return the key of a conversation's name, however long that is; None if it has none."""
    return _named("session", session)


def _decode(body: bytes) -> Mapping[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _named(kind: str, value: Any) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    return f"{kind} {value}" if len(value) <= _MAX_VALUE_CHARS else f"{kind} {_digest(value)}"


def _messages(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the messages of a chat, or the items of a response's input."""
    for name in ("messages", "input"):
        value = fields.get(name)
        if isinstance(value, str):
            yield {"role": "user", "content": value}
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, dict))
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        yield {"role": "user", "content": prompt}


def _media_keys(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _FIELD_BY_TYPE:
            continue
        medium = part.get(_FIELD_BY_TYPE[kind])
        url = medium.get("url") if isinstance(medium, dict) else medium
        uuid = part.get("uuid")
        if isinstance(uuid, str) and uuid:
            yield f"uuid {uuid[:_MAX_VALUE_CHARS]}"
        if isinstance(url, str) and url:
            yield f"picture {_digest(url)}"


def _opening_key(messages: list[Mapping[str, Any]]) -> str | None:
    """Return the key of all up to the user's first message: a conversation's turns share it."""
    for number, message in enumerate(messages):
        if message.get("role") == "user":
            return f"opening {blake3(msgspec.json.encode(messages[: number + 1])).hexdigest()}"
    return None


def _digest(text: str) -> str:
    return blake3(text.encode("utf-8", "surrogatepass")).hexdigest()
