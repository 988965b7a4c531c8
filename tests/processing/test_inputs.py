"""Placeholder ranges, items and their batches."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.processing import (
    MultiModalFieldConfig,
    MultiModalInputs,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalSharedField,
    PlaceholderRange,
    argsort_mm_positions,
    batched_tensors_equal,
)


def mask(*bits: int) -> np.ndarray:
    return np.array(bits, dtype=bool)


def items_of(data: dict[str, Any], **configs: MultiModalFieldConfig):
    return MultiModalKwargsItems.from_hf_inputs(data, configs)["image"]


def full(items) -> list[MultiModalKwargsItem]:
    return [item for item in items if item is not None]


class TestPlaceholderRange:
    def test_without_a_mask_every_position_embeds(self):
        one = PlaceholderRange(3, 4)
        assert one.get_num_embeds() == 4
        assert one.get_embeds_indices_in_range(1, 3) == (1, 3)
        assert one.extract_embeds_range() == [(3, 6)]
        assert one.embeds_cumsum is None

    def test_a_mask_chooses_positions(self):
        one = PlaceholderRange(10, 6, mask(0, 1, 1, 0, 1, 0))
        assert one.get_num_embeds() == 3
        assert one.extract_embeds_range() == [(11, 12), (14, 14)]
        assert one.embeds_cumsum == [0, 1, 2, 2, 3, 3]
        assert PlaceholderRange(0, 2, mask(0, 0)).extract_embeds_range() == []

    def test_equality_looks_at_the_mask(self):
        assert PlaceholderRange(0, 2, mask(0, 1)) == PlaceholderRange(0, 2, mask(0, 1))
        assert PlaceholderRange(0, 2, mask(0, 1)) != PlaceholderRange(0, 2, mask(1, 1))
        assert PlaceholderRange(0, 2, mask(1, 1)) != PlaceholderRange(0, 2)
        assert PlaceholderRange(0, 2, mask(1, 1)) != PlaceholderRange(0, 2, np.array([1, 1]))
        assert hash(PlaceholderRange(0, 2)) == hash(PlaceholderRange(0, 2, mask(1, 1)))

    def test_a_range_is_frozen_and_counts_once(self):
        bits = mask(0, 1, 0, 1)
        one = PlaceholderRange(0, 4, bits)
        with pytest.raises(AttributeError):
            one.offset = 1  # pyrefly: ignore[read-only]
        assert one.get_embeds_indices_in_range(1, 4) == (0, 2)
        bits[:] = True  # whatever is asked from here on, the mask is not counted again
        assert one.embeds_cumsum is one.embeds_cumsum
        assert one.get_embeds_indices_in_range(1, 3) == (0, 1)
        assert one.get_num_embeds() == 2

    def test_windows_end_where_the_range_ends(self):
        one = PlaceholderRange(0, 3, mask(1, 0, 1))
        assert one.get_embeds_indices_in_range(0, 0) == (0, 0)
        assert one.get_embeds_indices_in_range(2, 99) == (1, 2)
        assert PlaceholderRange(0, 0, mask()).get_num_embeds() == 0

    @given(st.lists(st.booleans(), max_size=20), st.integers(0, 9))
    def test_runs_cover_the_mask(self, bits: list[bool], offset: int):
        runs = PlaceholderRange(offset, len(bits), np.array(bits, bool)).extract_embeds_range()
        covered = [place - offset for start, end in runs for place in range(start, end + 1)]
        assert covered == [place for place, bit in enumerate(bits) if bit]
        assert all(end + 1 < start for (_, end), (start, _) in pairwise(runs))

    @given(st.lists(st.booleans(), min_size=1, max_size=20), st.data())
    def test_windows_cut_the_embeddings_in_order(self, bits: list[bool], data: st.DataObject):
        one = PlaceholderRange(0, len(bits), np.array(bits))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(bits)), max_size=4)))
        edges = [0, *cuts, len(bits)]
        rows = []
        for start, end in pairwise(edges):
            low, high = one.get_embeds_indices_in_range(start, end)
            assert high - low == sum(bits[start:end])
            rows += range(low, high)
        assert rows == list(range(one.get_num_embeds()))


class TestKwargsItems:
    def test_flat_and_batched_fields_split_into_items(self):
        pixels = np.arange(12, dtype=np.float32).reshape(3, 4)
        first, second = items_of(
            {"pixels": pixels, "sizes": np.array([1, 2]), "ignored": pixels},
            pixels=MultiModalFieldConfig.flat_from_sizes("image", np.array([1, 2])),
            sizes=MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            absent=MultiModalFieldConfig.batched("image"),
        )
        assert first is not None
        assert second is not None
        assert first.get_data()["pixels"].shape == (1, 4)
        assert second.get_data()["sizes"] == 2
        assert second.get_data()["sizes"].shape == ()
        assert second["sizes"].field.keep_on_cpu
        batch = MultiModalKwargsItems({"image": [first, second]}).get_data()
        assert batched_tensors_equal(batch, {"pixels": pixels, "sizes": np.array([1, 2])})

    def test_fields_of_one_modality_agree_on_the_number_of_items(self):
        with pytest.raises(ValueError, match="Cannot merge different batch sizes"):
            items_of(
                {"a": np.ones(2), "b": np.ones(3)},
                a=MultiModalFieldConfig.batched("image"),
                b=MultiModalFieldConfig.batched("image"),
            )

    def test_an_absent_modality_and_absent_data_are_named(self):
        items = MultiModalKwargsItems({"image": [None]})
        with pytest.raises(KeyError, match=r"`video` not found; available: `image`"):
            items["video"]
        with pytest.raises(RuntimeError, match=r"Found empty mm_items\['image'\]\[0\]"):
            items.get_item("image", 0)

    def test_own_arrays_lets_go_of_the_batch(self):
        batched = MultiModalFieldConfig.batched("image")
        rows = MultiModalFieldConfig.flat("image", [slice(0, 1), slice(1, 2)])
        batch = np.ones((2, 3))
        item = full(items_of({"x": batch, "rows": list(batch)}, x=batched, rows=rows))[0]
        owned = item.own_arrays()
        assert owned == item
        assert (item["x"].data.base is batch, owned["x"].data.base) == (True, None)
        assert (item["rows"].data[0].base is batch, owned["rows"].data[0].base) == (True, None)

    def test_a_batch_of_one_item_is_not_copied(self):
        batch = np.ones((1, 3))
        item = full(items_of({"x": batch}, x=MultiModalFieldConfig.batched("image")))[0]
        assert np.shares_memory(item.own_arrays()["x"].data, batch)

    def test_items_that_fit_no_one_batch_are_not_merged(self):
        config = MultiModalFieldConfig.batched("image")
        items = [
            *items_of({"x": np.ones((1, 3))}, x=config),
            *items_of({"y": np.ones(1)}, y=config),
        ]
        with pytest.raises(RuntimeError, match="image items cannot be merged into a single batch"):
            MultiModalKwargsItems({"image": items}).get_data()

    def test_keys_without_data_or_items_are_left_out(self):
        hf_inputs = {"a": np.ones((0, 2)), "b": None, "c": np.ones(2)}
        config = {key: MultiModalFieldConfig.batched("image") for key in "abcd"}
        (first, _) = full(MultiModalKwargsItems.from_hf_inputs(hf_inputs, config)["image"])
        assert list(first) == ["c"]
        assert MultiModalKwargsItems.from_hf_inputs({}, config) == {}

    def test_modalities_share_one_flat_dict(self):
        items = MultiModalKwargsItems.from_hf_inputs(
            {"a": np.ones((1, 2)), "b": np.ones((3, 4))},
            {
                "a": MultiModalFieldConfig.batched("image"),
                "b": MultiModalFieldConfig.batched("video"),
            },
        )
        assert {key: data.shape for key, data in items.get_data().items()} == {
            "a": (1, 2),
            "b": (3, 4),
        }

    def test_a_dummy_has_a_size(self):
        elem = MultiModalKwargsItem.dummy(5)["dummy"]
        assert (elem.data.dtype, elem.data.nbytes) == (np.uint8, 5)
        assert elem.field == MultiModalSharedField(batch_size=1)


def test_features_are_sorted_by_position():
    positions = {
        "image": [PlaceholderRange(9, 1), PlaceholderRange(0, 2)],
        "audio": [PlaceholderRange(4, 2)],
    }
    order = [("image", 1), ("audio", 0), ("image", 0)]
    assert argsort_mm_positions(positions) == order
    inputs = MultiModalInputs(
        prompt_token_ids=list(range(10)),
        mm_kwargs=MultiModalKwargsItems(
            {"image": [MultiModalKwargsItem.dummy(3), None], "audio": [None]}
        ),
        mm_hashes={"image": ["a", "b"], "audio": ["c"]},
        mm_placeholders=positions,
    )
    features = inputs.to_features()
    assert [(one.modality, one.identifier) for one in features] == [
        ("image", "b"),
        ("audio", "c"),
        ("image", "a"),
    ]
    tensors = [one.tensors for one in features]
    assert [item and len(item["dummy"].data) for item in tensors] == [None, None, 3]
