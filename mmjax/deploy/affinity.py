"""Which replica gets a request: the one whose caches know its pictures, unless it is overloaded.

A request has keys, by which it finds a replica that knows its pictures or its conversation. They
are read as far as they can be, and nothing is checked: the replica answers what is wrong with a
request. The table knows nothing of requests and of Ray: keys, ids and numbers come in, an order of
ids goes out.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import msgspec
from blake3 import blake3

from mmjax.config.settings import check_settings, setting

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
MAX_OWNERS = 2


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """How long a key stays where it is, and how much load it may cost."""

    max_load_difference: int = setting(
        8,
        """Requests that an owner of a picture may have more than another replica, before that one
        becomes an owner, too.""",
        minimum=1,
    )
    ownership_s: float = setting(
        600.0,
        """Seconds after which a picture is placed anew. It then mostly stays; but where a replica
        has died and another one has come, the new one gets its share in that time.""",
        above=0,
    )
    max_keys: int = setting(
        65_536, "Pictures and sessions whose owners are remembered, at most.", minimum=1
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(slots=True)
class _Ownership:
    expires_at: float
    owners: list[str] = field(default_factory=list)


class AffinityTable:
    """Remembers which replicas have seen a key: a session, a picture, a conversation's opening.

    Not thread-safe: for one event loop.
    """

    def __init__(self, config: RoutingConfig | None = None) -> None:
        self._config = RoutingConfig() if config is None else config
        self._ownership: OrderedDict[str, _Ownership] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ownership)

    def rank(
        self,
        keys: Sequence[str],
        loads: Mapping[str, int],
        *,
        now: float,
        avoided: AbstractSet[str] = frozenset(),
    ) -> list[str]:
        """Return the replicas, the best one first. Changes nothing.

        Args:
            keys: The request's, the most telling first; the first one that has an owner decides.
            loads: Requests in work, by replica; those of all replicas that can take some.
            now: Seconds, of any monotonic clock.
            avoided: Replicas that have failed this request; they come last.
        """
        if not loads:
            return []
        place = keys[0] if keys else ""
        by_place = sorted(loads, key=lambda one: _weight(place, one), reverse=True)
        usable = [one for one in by_place if one not in avoided] or by_place
        owners = next(filter(None, (self._owners(key, usable, now) for key in keys)), [])
        idle = min(usable, key=lambda one: loads[one])
        if owners:
            best = min(owners, key=lambda one: loads[one])
        elif keys:
            best = self._first_of_two(usable, loads)
        else:
            best = idle
        if loads[best] - loads[idle] >= self._config.max_load_difference:
            best = idle
        others = [one for one in by_place if one != best]
        others.sort(key=lambda one: (one in avoided, one not in owners, loads[one]))
        return [best, *others]

    def note(self, keys: Sequence[str], replica: str, *, now: float) -> None:
        """Record that a replica has got a request with these keys."""
        for key in keys:
            ownership = self._ownership.pop(key, None)
            if ownership is None or now >= ownership.expires_at:
                # Half to one and a half of it, so that keys of a burst are not placed anew in one.
                lifetime_s = self._config.ownership_s * (0.5 + _weight(key, "") / 2**64)
                ownership = _Ownership(now + lifetime_s)
            if replica not in ownership.owners:
                ownership.owners = [*ownership.owners[-(MAX_OWNERS - 1) :], replica]
            self._ownership[key] = ownership
        while len(self._ownership) > self._config.max_keys:
            self._ownership.popitem(last=False)

    def _owners(self, key: str, usable: Sequence[str], now: float) -> list[str]:
        ownership = self._ownership.get(key)
        if ownership is None or now >= ownership.expires_at:
            return []
        return [one for one in ownership.owners if one in usable]

    def _first_of_two(self, by_place: Sequence[str], loads: Mapping[str, int]) -> str:
        """Return the first one by place, or the second one if that has clearly less to do."""
        first, *others = by_place[:2]
        margin = self._config.max_load_difference / 2
        return next((one for one in others if loads[first] - loads[one] >= margin), first)


def _weight(key: str, replica: str) -> int:
    """Return the weight of a rendezvous hash, of 64 bits: every router has the same."""
    digest = hashlib.blake2b(f"{key}\0{replica}".encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest())
