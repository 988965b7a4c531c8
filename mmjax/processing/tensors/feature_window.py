"""Which features a window of the prompt touches, and which the engine has done with.

Features come sorted by their place in the prompt, as `MultiModalInputs.to_features` gives them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem


def get_mm_features_in_window(
    mm_features: Sequence[MultiModalFeatureSpec], start: int, end: int
) -> tuple[int, int]:
    """Return the range of features, half-open, that overlap the tokens `[start, end)`."""
    low = bisect_right(mm_features, start, key=_get_end)
    high = bisect_left(mm_features, end, key=_get_offset)
    return low, max(low, high) if start < end else low


def _get_offset(feature: MultiModalFeatureSpec) -> int:
    return feature.mm_position.offset


def _get_end(feature: MultiModalFeatureSpec) -> int:
    return feature.mm_position.offset + feature.mm_position.length


def strip_covered_mm_data(
    mm_features: Sequence[MultiModalFeatureSpec],
    num_computed_tokens: int,
    uses_mrope: bool = False,
) -> list[MultiModalFeatureSpec]:
    """Return the features without the tensors of those that the computed prefix covers.

    Multimodal rotary positions need every item's sizes: with `uses_mrope`, fields that stay on the
    host are kept. So is an item that only says where in shared memory its tensors are: the
    reader has yet to give them back.
    """
    return [
        replace(feature, data=_strip(feature.data, uses_mrope))
        if isinstance(feature.data, MultiModalKwargsItem)
        and _get_end(feature) <= num_computed_tokens
        else feature
        for feature in mm_features
    ]


def _strip(item: MultiModalKwargsItem, uses_mrope: bool) -> MultiModalKwargsItem | None:
    if not uses_mrope:
        return None
    kept = {key: elem for key, elem in item.items() if elem.field.keep_on_cpu}
    return MultiModalKwargsItem(kept) if kept else None
