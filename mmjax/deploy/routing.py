"""Which replica gets a request: the one whose caches know its pictures, unless it is overloaded.

Knows nothing of requests and of Ray: keys, ids and numbers come in, an order of ids goes out.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from mmjax.config.settings import check_settings, setting

MAX_OWNERS = 2


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
                ownership = _Ownership(now + self._lifetime(key))
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

    def _lifetime(self, key: str) -> float:
        # Half to one and a half of it, so that keys of one burst are not placed anew in one.
        return self._config.ownership_s * (0.5 + _weight(key, "") / 2**64)

    def _first_of_two(self, by_place: Sequence[str], loads: Mapping[str, int]) -> str:
        """Return the first one by place, or the second one if that has clearly less to do."""
        first, *others = by_place[:2]
        margin = self._config.max_load_difference / 2
        return next((one for one in others if loads[first] - loads[one] >= margin), first)


def _weight(key: str, replica: str) -> int:
    """Return the weight of a rendezvous hash, of 64 bits: every front has the same."""
    digest = hashlib.blake2b(f"{key}\0{replica}".encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest())
