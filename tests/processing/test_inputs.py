"""Placeholder ranges, items and their batches."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.processing import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalInputs,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
    argsort_mm_positions,
    batched_tensors_equal,
    group_and_batch_mm_items,
    nested_tensors_equal,
)


def mask(*bits: int) -> np.ndarray:
    return np.array(bits, dtype=bool)


def items_of(data: dict[str, np.ndarray], **configs: MultiModalFieldConfig):
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

    def test_sizes_run_along_any_axis(self):
        data = np.arange(12).reshape(2, 6)
        config = MultiModalFieldConfig.flat_from_sizes("image", [2, 4], dim=1)
        items = items_of({"x": data}, x=config)
        assert [item["x"].data.shape for item in full(items)] == [(2, 2), (2, 4)]
        with pytest.raises(ValueError, match="1-D tensor"):
            MultiModalFieldConfig.flat_from_sizes("image", np.ones((2, 2)))
        with pytest.raises(ValueError, match="several axes"):
            config.build_elems("x", [1, 2])

    def test_shared_data_is_the_same_object(self):
        config = MultiModalFieldConfig.shared("image", 2)
        first, second = config.build_elems("x", np.ones(3))
        assert first is second
        assert first.field.reduce_data([first, second]) is first.data

    def test_fields_of_one_modality_agree_on_the_number_of_items(self):
        with pytest.raises(ValueError, match="Cannot merge different batch sizes"):
            items_of(
                {"a": np.ones(2), "b": np.ones(3)},
                a=MultiModalFieldConfig.batched("image"),
                b=MultiModalFieldConfig.batched("image"),
            )

    def test_unequal_shapes_stay_a_list_or_are_padded(self):
        batched = MultiModalFieldConfig.batched("image")
        elems = batched.build_elems("x", [np.ones(2), np.ones(3)])
        assert nested_tensors_equal(elems[0].field.reduce_data(elems), [np.ones(2), np.ones(3)])
        assert batched.field.reduce_data(elems[:1]).shape == (1, 2)
        flat = MultiModalFieldConfig.flat("image", [slice(0, 1)])
        narrow = flat.build_elems("x", np.ones((1, 2)))
        wide = flat.build_elems("x", np.ones((1, 3)))
        merged = flat.field.reduce_data([*narrow, *wide])
        assert merged.tolist() == [[1, 1, 0], [1, 1, 1]]
        nested = flat.build_elems("x", [np.ones(2)])
        assert len(flat.field.reduce_data([*nested, *nested])) == 2
        with pytest.raises(ValueError, match="different field types"):
            flat.field.reduce_data([*narrow, *elems])

    def test_an_absent_modality_and_absent_data_are_named(self):
        items = MultiModalKwargsItems({"image": [None]})
        with pytest.raises(KeyError, match=r"`video` not found; available: `image`"):
            items["video"]
        with pytest.raises(RuntimeError, match=r"Found empty mm_items\['image'\]\[0\]"):
            items.require_data()

    def test_own_arrays_lets_go_of_the_batch(self):
        item = full(items_of({"x": np.ones((2, 3))}, x=MultiModalFieldConfig.batched("image")))[0]
        assert item["x"].data.base is not None
        assert item.own_arrays()["x"].data.base is None
        assert item.own_arrays() == item

    def test_consecutive_items_that_fit_are_batched(self):
        batched = MultiModalFieldConfig.batched("image")
        shared = MultiModalFieldConfig.shared("image", 1)
        a, b = full(items_of({"x": np.ones((2, 3))}, x=batched))
        c = full(items_of({"x": np.ones((1, 3)), "y": np.ones(1)}, x=batched, y=batched))[0]
        d = full(items_of({"x": np.ones(1)}, x=shared))[0]
        e = full(items_of({"x": np.zeros(1)}, x=shared))[0]
        groups = [(n, sorted(kwargs)) for n, kwargs in group_and_batch_mm_items([a, b, c, a, d, e])]
        assert groups == [(2, ["x"]), (1, ["x", "y"]), (1, ["x"]), (1, ["x"]), (1, ["x"])]
        with pytest.raises(RuntimeError, match="cannot be merged into a single batch"):
            MultiModalKwargsItems({"image": [a, c]}).get_data()


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
    gathered = MultiModalFeatureSpec.gather_kwargs(features, ["dummy", "other"])
    assert [len(tensor) for tensor in gathered["dummy"]] == [3]
    assert gathered["other"] == []


def test_nested_tensors_compare_by_structure():
    assert nested_tensors_equal([np.ones(2)], [np.ones(2)])
    assert not nested_tensors_equal([np.ones(2)], (np.ones(2),))
    assert not nested_tensors_equal(np.ones(2), np.ones(2, np.float32))
    assert nested_tensors_equal(np.ones(2), np.ones(2, np.float32), check_dtype=False)
    assert not nested_tensors_equal(np.ones(2), [1.0, 1.0])
    assert not batched_tensors_equal({"a": np.ones(1)}, {})
