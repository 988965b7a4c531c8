"""How many replicas a deployment should have, by the requests that wait for an engine.

Knows nothing of Ray: numbers in, a number out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mmjax.config.settings import check_settings, setting


class ReplicaLoad(NamedTuple):
    """What one replica does."""

    num_running: float
    num_waiting: float
    """Also those whose prompt is being processed."""


_SPARE = 0.5
"""Share of the places that must be free in the replicas that stay, when one is taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """When to add a replica, and when to take one away."""

    target_num_waiting: float = setting(
        4.0, "Requests that may wait at each replica before one is added.", above=0
    )

    def __post_init__(self) -> None:
        check_settings(self)


def wanted_replicas(
    loads: Sequence[ReplicaLoad], current: int, config: ScalingConfig, *, max_num_running: int
) -> int:
    """Return how many replicas there should be; bounds are the caller's.

    Args:
        loads: Of the replicas that told theirs.
        current: Replicas that there are, or that start.
        config: The limits.
        max_num_running: Requests that one replica runs at once.
    """
    num_waiting = sum(load.num_waiting for load in loads)
    if num_waiting > config.target_num_waiting * current:
        return max(current + 1, math.ceil(num_waiting / config.target_num_waiting))
    room = (current - 1) * max_num_running * (1 - _SPARE)
    is_idle = num_waiting == 0 and sum(load.num_running for load in loads) <= room
    # Nothing is known of one that starts, or that is silent.
    return current - 1 if is_idle and len(loads) >= current > 1 else current
