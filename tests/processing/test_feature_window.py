"""Features by their place in the prompt: sorted, in a window, done with."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmjax.processing import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
    argsort_mm_positions,
    get_mm_features_in_window,
    strip_covered_mm_data,
)
from mmjax.processing.tensors.inputs import SharedItem


def feature(offset: int, length: int, **on_cpu: bool) -> MultiModalFeatureSpec:
    item = MultiModalKwargsItem(
        {
            key: MultiModalFieldElem(np.ones(1), MultiModalBatchedField(keep_on_cpu=value))
            for key, value in on_cpu.items()
        }
    )
    return MultiModalFeatureSpec(
        data=item,
        modality="image",
        identifier="id",
        mm_position=PlaceholderRange(offset, length),
        mm_hash="id",
    )


@st.composite
def ranges(draw: st.DrawFn) -> list[PlaceholderRange]:
    """Ranges that stand one behind the other, as in a prompt."""
    spans = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=8))
    found, place = [], 0
    for gap, length in spans:
        found.append(PlaceholderRange(place + gap, length))
        place += gap + length
    return found


@given(ranges(), st.integers(0, 70), st.integers(0, 70))
def test_a_window_finds_what_a_scan_finds(positions: list[PlaceholderRange], start: int, end: int):
    features = [feature(one.offset, one.length) for one in positions]
    low, high = get_mm_features_in_window(features, start, end)
    assert 0 <= low <= high <= len(features)
    assert list(range(low, high)) == [
        index
        for index, one in enumerate(positions)
        if start < end and one.offset < end and start < one.offset + one.length
    ]


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 5), max_size=5)))
def test_positions_are_sorted_as_a_slow_sort_does(offsets: dict[str, list[int]]):
    positions = {
        modality: [PlaceholderRange(offset, 1) for offset in row]
        for modality, row in offsets.items()
    }
    want = [
        (modality, index)
        for place in range(6)
        for modality, row in offsets.items()
        for index, offset in enumerate(row)
        if offset == place
    ]
    assert argsort_mm_positions(positions) == want


class TestStripping:
    def test_what_the_prefix_covers_loses_its_tensors(self):
        features = [feature(0, 4, x=False), feature(4, 4, x=False), feature(8, 4, x=False)]
        for num_tokens, kept in [(0, 3), (3, 3), (4, 2), (7, 2), (8, 1), (12, 0), (99, 0)]:
            stripped = strip_covered_mm_data(features, num_tokens)
            assert [one.data is None for one in stripped] == [True] * (3 - kept) + [False] * kept
            assert [one.mm_position for one in stripped] == [one.mm_position for one in features]
        assert all(one.data is not None for one in features)

    def test_rotary_positions_keep_what_stays_on_the_host(self):
        features = [feature(0, 4, pixels=False, grid=True), feature(4, 4, pixels=False)]
        grids, none = strip_covered_mm_data(features, 8, uses_mrope=True)
        assert grids.tensors is not None
        assert list(grids.tensors) == ["grid"]
        assert none.data is None
        assert strip_covered_mm_data(features, 4, uses_mrope=True)[1] is features[1]

    def test_an_address_in_shared_memory_stays(self):
        features = [feature(0, 4)]
        features[0].data = SharedItem(mm_hash="a", number=1, layout=b"")
        assert strip_covered_mm_data(features, 4) == features

    def test_an_item_that_was_never_sent_stays_absent(self):
        one = feature(0, 4)
        one.data = None
        assert strip_covered_mm_data([one], 4) == [one]
