"""Batches split into items, and items merge into the batch that they came from."""

from itertools import accumulate, pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mmjax.processing import (
    MultiModalBatchedField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalSharedField,
    NestedTensors,
    batched_tensors_equal,
    group_and_batch_mm_items,
    group_and_batch_mm_kwargs,
    nested_tensors_equal,
)

DTYPES = st.sampled_from([np.float32, np.float16, np.int64, np.uint8, np.bool_])
SHAPES = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


@st.composite
def batches(draw: st.DrawFn, min_side: int = 0) -> np.ndarray:
    shape = draw(st.lists(st.integers(min_side, 3), min_size=1, max_size=4).map(tuple))
    return draw(arrays(draw(DTYPES), shape, elements=st.integers(0, 1)))


def merge(config: MultiModalFieldConfig, elems: Any) -> NestedTensors:
    return config.field.reduce_data(elems)


class TestSplitThenMerge:
    @given(batches(min_side=1))
    def test_batched(self, batch: np.ndarray):
        config = MultiModalFieldConfig.batched("image")
        elems = config.build_elems("x", batch)
        assert [elem.data.shape for elem in elems] == [batch.shape[1:]] * len(batch)
        assert nested_tensors_equal(merge(config, elems), batch)

    @given(batches(), st.data())
    def test_flat_from_sizes(self, batch: np.ndarray, data: st.DataObject):
        dim = data.draw(st.integers(0, batch.ndim - 1))
        cuts = data.draw(st.lists(st.integers(0, batch.shape[dim]), max_size=4).map(sorted))
        sizes = [stop - start for start, stop in pairwise([0, *cuts, batch.shape[dim]])]
        convert = data.draw(st.sampled_from([list, np.array, jnp.array, torch.tensor]))
        config = MultiModalFieldConfig.flat_from_sizes("image", convert(sizes), dim=dim)
        elems = config.build_elems("x", batch)
        assert [elem.data.shape[dim] for elem in elems] == sizes
        assert nested_tensors_equal(merge(config, elems), batch)

    @given(batches(), st.data())
    def test_flat(self, batch: np.ndarray, data: st.DataObject):
        cuts = data.draw(st.lists(st.integers(0, len(batch)), max_size=4).map(sorted))
        slices = [slice(start, stop) for start, stop in pairwise([0, *cuts, len(batch)])]
        config = MultiModalFieldConfig.flat("image", slices)
        elems = config.build_elems("x", batch)
        assert nested_tensors_equal(merge(config, elems), batch)
        rows = config.build_elems("x", list(batch))
        assert nested_tensors_equal(merge(config, rows), list(batch))

    @given(batches(), st.integers(1, 5))
    def test_shared(self, batch: np.ndarray, batch_size: int):
        config = MultiModalFieldConfig.shared("image", batch_size)
        elems = config.build_elems("x", batch)
        assert len(elems) == batch_size
        assert all(elem is elems[0] for elem in elems)
        assert merge(config, elems) is batch

    @given(st.lists(batches(), min_size=1, max_size=4))
    def test_a_list_of_unequal_tensors(self, tensors: list[np.ndarray]):
        config = MultiModalFieldConfig.batched("image")
        merged = merge(config, config.build_elems("x", tensors))
        if isinstance(merged, np.ndarray):
            assert nested_tensors_equal(list(merged), tensors)
        else:
            assert nested_tensors_equal(merged, tensors)

    @given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.data())
    def test_all_fields_of_a_modality_at_once(self, sizes: list[int], data: st.DataObject):
        hf_inputs = {
            "pixels": data.draw(arrays(np.float32, (sum(sizes), 2))),
            "columns": data.draw(arrays(np.int32, (2, sum(sizes)))),
            "sizes": np.array(sizes),
            "token_id": np.array(7),
        }
        config_by_key = {
            "pixels": MultiModalFieldConfig.flat_from_sizes("image", sizes),
            "columns": MultiModalFieldConfig.flat_from_sizes("image", sizes, dim=1),
            "sizes": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            "token_id": MultiModalFieldConfig.shared("image", len(sizes)),
        }
        items = MultiModalKwargsItems.from_hf_inputs(hf_inputs, config_by_key)
        merged = items.get_data()
        assert merged.keys() == hf_inputs.keys()
        for key, tensor in hf_inputs.items():
            np.testing.assert_array_equal(merged[key], tensor)


@given(st.lists(arrays(np.float32, st.tuples(*[st.integers(0, 3)] * 3)), min_size=2), st.data())
def test_unequal_sides_are_filled_with_zeros(parts: list[np.ndarray], data: st.DataObject):
    dim = data.draw(st.integers(-3, 2))
    field = MultiModalFlatField(slices=[], dim=dim)
    merged = field.reduce_data([MultiModalFieldElem(part, field) for part in parts])
    longest = [max(part.shape[axis] for part in parts) for axis in range(3)]
    longest[dim] = sum(part.shape[dim] for part in parts)
    assert merged.shape == tuple(longest)
    starts = accumulate((part.shape[dim] for part in parts), initial=0)
    rest = merged.copy()
    for part, start in zip(parts, starts, strict=False):
        place = [slice(0, length) for length in part.shape]
        place[dim] = slice(start, start + part.shape[dim])
        np.testing.assert_array_equal(merged[tuple(place)], part)
        rest[tuple(place)] = 0
    assert not rest.any()


def test_an_items_field_does_not_grow_with_the_batch():
    config = MultiModalFieldConfig.flat_from_sizes("image", [1] * 100)
    fields = {id(elem.field) for elem in config.build_elems("x", np.ones(100))}
    assert len(fields) == 1
    (elem, *_) = config.build_elems("x", np.ones(100))
    assert isinstance(elem.field, MultiModalFlatField)
    assert elem.field.slices == ()


class TestMerging:
    def test_one_tensor_is_a_view_or_itself(self):
        row = np.ones(3)
        field = MultiModalBatchedField()
        merged = field.reduce_data([MultiModalFieldElem(row, field)])
        assert merged.shape == (1, 3)
        assert merged.base is row
        flat = MultiModalFlatField(slices=[slice(0, 3)])
        assert flat.reduce_data([MultiModalFieldElem(row, flat)]) is row

    def test_kinds_of_fields_do_not_mix(self):
        elems = [
            MultiModalFieldElem(np.ones(1), MultiModalBatchedField()),
            MultiModalFieldElem(np.ones(1), MultiModalSharedField(batch_size=1)),
        ]
        with pytest.raises(ValueError, match="Cannot merge different field types"):
            elems[0].field.reduce_data(elems)

    def test_what_cannot_merge_is_named(self):
        field = MultiModalFlatField(slices=[], dim=1)
        with pytest.raises(ValueError, match="lists merge along axis 0 alone"):
            field.reduce_data([MultiModalFieldElem([np.ones(2)], field)] * 2)
        elems = [MultiModalFieldElem(np.ones(shape), field) for shape in [(2, 2), (2, 2, 2)]]
        with pytest.raises(ValueError, match=r"\(2, 2\), \(2, 2, 2\) have no axis"):
            field.reduce_data(elems)

    def test_nothing_merges_into_nothing(self):
        assert MultiModalBatchedField().reduce_data([]) == []
        assert MultiModalFlatField(slices=[]).reduce_data([]) == []


class TestConfigs:
    @pytest.mark.parametrize(
        ("config", "kind"),
        [
            (MultiModalFieldConfig.batched("video"), MultiModalBatchedField),
            (MultiModalFieldConfig.flat("video", [slice(0, 1)], dim=0), MultiModalFlatField),
            (MultiModalFieldConfig.flat_from_sizes("video", [1]), MultiModalFlatField),
            (MultiModalFieldConfig.shared("video", 2), MultiModalSharedField),
        ],
    )
    def test_each_holds_its_field_and_modality(self, config: MultiModalFieldConfig, kind: type):
        assert type(config.field) is kind
        assert config.modality == "video"
        assert not config.field.keep_on_cpu

    def test_fields_stay_on_the_host_where_that_is_said(self):
        for config in [
            MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            MultiModalFieldConfig.flat("image", [], keep_on_cpu=True),
            MultiModalFieldConfig.flat_from_sizes("image", [1], keep_on_cpu=True),
            MultiModalFieldConfig.shared("image", 1, keep_on_cpu=True),
        ]:
            assert config.field.keep_on_cpu

    def test_slices_from_sizes(self):
        first = MultiModalFieldConfig.flat_from_sizes("image", [2, 0, 1]).field
        assert isinstance(first, MultiModalFlatField)
        assert first.slices == [slice(0, 2), slice(2, 2), slice(2, 3)]
        second = MultiModalFieldConfig.flat_from_sizes("image", [2, 1], dim=1).field
        assert isinstance(second, MultiModalFlatField)
        assert second.slices == [(slice(None), slice(0, 2)), (slice(None), slice(2, 3))]
        assert second.dim == 1

    @pytest.mark.parametrize("sizes", [7, [[1, 2]], np.ones((2, 2), int), torch.ones(1, 1)])
    def test_sizes_have_one_axis(self, sizes: Any):
        with pytest.raises(ValueError, match="size_per_item should be a 1-D tensor"):
            MultiModalFieldConfig.flat_from_sizes("image", sizes)

    @pytest.mark.parametrize("sizes", [[-1], [2, -1], [1.5], ["a"]])
    def test_sizes_are_whole_numbers(self, sizes: Any):
        with pytest.raises(ValueError, match="whole numbers from 0 on"):
            MultiModalFieldConfig.flat_from_sizes("image", sizes)

    def test_slices_over_several_axes_need_a_tensor(self):
        config = MultiModalFieldConfig.flat_from_sizes("image", [1, 1], dim=1)
        with pytest.raises(ValueError, match="`x` is a list"):
            config.build_elems("x", [1, 2])
        with pytest.raises(ValueError, match="dim is -1"):
            MultiModalFieldConfig.flat_from_sizes("image", [1], dim=-1)


class TestEquality:
    @pytest.mark.parametrize(
        ("a", "b", "expected"),
        [
            (np.ones(2), np.ones(2), True),
            (np.ones(2), np.zeros(2), False),
            (np.ones(2), np.ones((1, 2)), False),
            (np.ones(2), np.ones(2, np.float32), False),
            (np.ones(2, np.float32), jnp.ones(2), True),
            (np.ones(2, np.float32), torch.ones(2), True),
            ([np.ones(2)], [np.ones(2)], True),
            ([np.ones(2)], (np.ones(2),), False),
            ([np.ones(2)], np.ones((1, 2)), False),
            ([np.ones(2)], [np.ones(2), np.ones(2)], False),
            ([[np.ones(2)], []], [[np.ones(2)], []], True),
            (np.ones(2), [1.0, 1.0], False),
            (1, 1, True),
            (1, 1.0, False),
            (None, None, True),
            (None, np.ones(1), False),
        ],
    )
    def test_tensors_by_structure_dtype_and_values(self, a: Any, b: Any, expected: bool):
        assert nested_tensors_equal(a, b) is expected
        assert nested_tensors_equal(b, a) is expected

    def test_dtypes_may_be_left_out(self):
        assert nested_tensors_equal(np.ones(2), np.ones(2, np.float32), check_dtype=False)
        assert not nested_tensors_equal(np.ones(2), np.zeros(2, np.float32), check_dtype=False)

    def test_batches_compare_by_the_keys_of_the_first(self):
        one, two = np.ones(1), np.ones(2)
        assert batched_tensors_equal({"a": one}, {"a": one, "b": two})
        assert not batched_tensors_equal({"a": one, "b": two}, {"a": one})
        assert not batched_tensors_equal({"a": one}, {"a": two})

    def test_elements_compare_by_data_and_kind_of_field(self):
        def flat(size: int) -> MultiModalFlatField:
            return MultiModalFlatField(slices=[slice(0, size)])

        one = MultiModalFieldElem(np.ones(1), flat(1))
        assert one == MultiModalFieldElem(np.ones(1), flat(2))
        assert one != MultiModalFieldElem(np.zeros(1), flat(1))
        assert one != MultiModalFieldElem(np.ones(1), MultiModalBatchedField())
        assert one != np.ones(1)
        with pytest.raises(TypeError):
            hash(one)


def item(**tensors: Any) -> MultiModalKwargsItem:
    """One item; `name_` is a shared tensor."""
    shared, batched = MultiModalSharedField(batch_size=1), MultiModalBatchedField()
    return MultiModalKwargsItem(
        {
            key: MultiModalFieldElem(np.array(value), shared if key.endswith("_") else batched)
            for key, value in tensors.items()
        }
    )


class TestGrouping:
    @pytest.mark.parametrize(
        ("items", "sizes"),
        [
            ([], []),
            ([item(x=1)], [1]),
            ([item(x=1), item(x=2), item(x=3)], [3]),
            ([item(x=1, y=2), item(y=1, x=2)], [2]),
            ([item(x=1), item(x=1, y=2), item(x=1)], [1, 1, 1]),
            ([item(x_=1), item(x_=1), item(x_=2), item(x_=2), item(x_=1)], [2, 2, 1]),
            ([item(x=1), item(x=[1, 2])], [2]),
        ],
    )
    def test_runs_of_items_that_fit(self, items: list[MultiModalKwargsItem], sizes: list[int]):
        groups = list(group_and_batch_mm_items(items))
        assert [size for size, _ in groups] == sizes
        split = [
            row for size, kwargs in groups for row in (kwargs["x"][:size] if "x" in kwargs else [])
        ]
        assert nested_tensors_equal(split, [one["x"].data for one in items if "x" in one])

    def test_a_field_of_another_kind_splits(self):
        other = MultiModalKwargsItem(
            {"x": MultiModalFieldElem(np.array(1), MultiModalSharedField(batch_size=1))}
        )
        assert [size for size, _ in group_and_batch_mm_items([item(x=1), other])] == [1, 1]

    @given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")), max_size=12))
    def test_modalities_split_too(self, rows: list[tuple[str, str]]):
        groups = list(group_and_batch_mm_kwargs((m, item(**{key: 1})) for m, key in rows))
        again = [(m, *kwargs) for m, size, kwargs in groups for _ in range(size)]
        assert again == rows
        assert all(a[:1] + tuple(a[2]) != b[:1] + tuple(b[2]) for a, b in pairwise(groups))
        assert all(len(kwargs[key]) == size for _, size, kwargs in groups for key in kwargs)


def test_arrays_of_other_libraries_become_numpy():
    config = {"x": MultiModalFieldConfig.batched("image")}
    for data in (jnp.ones((2, 3)), torch.ones(2, 3), [torch.ones(3), jnp.ones(3)]):
        items = MultiModalKwargsItems.from_hf_inputs({"x": data}, config)["image"]
        for one in items:
            assert one is not None
            assert isinstance(one["x"].data, np.ndarray)
