"""Which items of any size go into which call of `encode`, and where. Numbers only, no arrays.

Items stand one behind the other in a call, each with a segment id of its own, so that attention
keeps them apart: a batch of pictures of mixed sizes is one call, and no size compiles anew.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mmjax.engine.scheduling.buckets import ladder, next_bucket
from mmjax.rounding import round_up

PADDING_SEGMENT = -1
"""Of rows behind the last item, as `layers.attention_segments` has it."""
MIN_PATCHES = 128
"""Of the smallest bucket, and what all are a multiple of: TPU kernels pad rows to it."""
MAX_PACKED_PATCHES = 4096
"""Of the largest call, unless one item alone has more; what is beyond takes several calls."""


class PackedCall(NamedTuple):
    """One call of `encode`."""

    bucket: int
    """Patches in it, with padding."""
    items: list[int]
    """Their numbers, in order."""


def patch_buckets(
    *, largest_item: int, encoder_budget: int, patches_per_token: int
) -> tuple[int, ...]:
    """Return the sizes of packed calls, all multiples of `patches_per_token`.

    Args:
        largest_item: Its patches: any item fits the last size.
        encoder_budget: Patches that a step may encode: a larger call would never be full.
        patches_per_token: Patches that become one embedding.
    """
    first = round_up(MIN_PATCHES, patches_per_token)
    last = max(largest_item, min(encoder_budget, MAX_PACKED_PATCHES))
    return ladder(first, round_up(last, first), 2)


def plan_calls(num_patches: Sequence[int], buckets: Sequence[int]) -> list[PackedCall]:
    """Put each item into the first call with room for it, and each call into its bucket.

    Items of 600, 700, 100 patches, buckets up to 1,024: [(1024, [0, 2]), (1024, [1])]. At most one
    call is less than half full.
    """
    calls: list[list[int]] = []
    used: list[int] = []
    for number, size in enumerate(num_patches):
        assert 0 <= size <= buckets[-1], f"{size=} {buckets[-1]=}"
        place = next((n for n, sum_ in enumerate(used) if sum_ + size <= buckets[-1]), len(calls))
        if place == len(calls):
            calls.append([])
            used.append(0)
        calls[place].append(number)
        used[place] += size
    return [
        PackedCall(next_bucket(buckets, total), items)
        for total, items in zip(used, calls, strict=True)
    ]


def make_segment_ids(num_patches: Sequence[int], bucket: int) -> np.ndarray:
    """Return int32[bucket]: for items of 3 and 2 patches in 8, 0 0 0 1 1 -1 -1 -1."""
    ids = np.full(bucket, PADDING_SEGMENT, np.int32)
    ids[: sum(num_patches)] = np.repeat(np.arange(len(num_patches), dtype=np.int32), num_patches)
    return ids
