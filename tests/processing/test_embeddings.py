"""Items that were encoded before: told from pictures, checked, counted, divided."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mmjax.errors import RequestError, RequestTypeError, RequestValueError
from mmjax.processing import (
    AudioEmbeddingItems,
    DictEmbeddingItems,
    EmbeddingItems,
    ImageEmbeddingItems,
    ImageProcessorItems,
    MediaWithBytes,
    MultiModalDataParser,
    MultiModalFieldConfig,
    VideoEmbeddingItems,
)

MERGE = 2


def grid_fields(data: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
    """A picture of (1, h, w) patches has h * w / 4 rows."""
    grid = np.asarray(data.get("image_grid_thw", np.zeros((0, 3), np.int64)))
    return {
        "image_embeds": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1) // MERGE**2),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }


class GridParser(MultiModalDataParser):
    embedding_fields = {"image": {"image_embeds": "values", "image_grid_thw": "metadata"}}  # noqa: RUF012

    def _get_embedding_fields_config(
        self, modality: str, data: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return grid_fields(data)


GRID = np.array([[1, 4, 4], [1, 2, 6]])
ROWS = np.arange(7 * 8, dtype=np.float32).reshape(7, 8)
FIELDS = ("image_embeds", "image_grid_thw")


class TestWhatCountsAsEmbeddings:
    @pytest.mark.parametrize(
        ("data", "expected"),
        [
            (jnp.ones((2, 7, 16)), True),
            (torch.ones(2, 7, 16), True),
            (torch.ones(2, 7, 16, dtype=torch.bfloat16), True),
            (jnp.ones((1, 7, 16)), True),
            ([jnp.ones((7, 16))], True),
            ([torch.ones(7, 16)], True),
            ((jnp.ones((7, 16)),), True),
            ([None, jnp.ones((7, 16))], True),
            (np.ones((2, 7, 16)), False),
            ([np.ones((7, 16))], False),
            (jnp.ones((7, 16)), False),
            (torch.ones(7, 16), False),
            (jnp.ones((1, 2, 7, 16)), False),
            ([jnp.ones((2, 7, 16))], False),
            (jnp.ones((20, 30, 3)), False),
            (jnp.ones((3, 20, 30), jnp.uint8), False),
            (torch.ones(5, 20, 30, dtype=torch.int64), False),
            ([], False),
            ([None], False),
            (None, False),
            ("text", False),
            (MediaWithBytes(np.ones((2, 7, 16)), b"png"), False),
            ({"image_embeds": jnp.ones((2, 7, 16))}, False),
        ],
    )
    def test_by_library_axes_and_dtype(self, data: Any, expected: bool):
        assert MultiModalDataParser.is_embeddings(data) is expected

    @pytest.mark.parametrize(
        ("shape", "hidden", "kind"),
        [
            ((1, 20, 30), 30, ImageEmbeddingItems),
            ((3, 20, 30), 30, ImageEmbeddingItems),
            ((1, 20, 30), None, ImageEmbeddingItems),
            ((3, 20, 30), 64, ImageProcessorItems),
            ((2, 20, 30), None, ImageEmbeddingItems),
        ],
    )
    def test_the_models_width_tells_channels_from_items(
        self, shape: tuple[int, ...], hidden: int | None, kind: type
    ):
        parser = MultiModalDataParser(expected_hidden_size=hidden)
        for data in (jnp.ones(shape), torch.ones(shape)):
            assert isinstance(parser.parse_mm_data({"image": data})["image"], kind)


class TestArrays:
    @pytest.mark.parametrize(
        ("kind", "key"),
        [
            (ImageEmbeddingItems, "image_embeds"),
            (VideoEmbeddingItems, "video_embeds"),
            (AudioEmbeddingItems, "audio_embeds"),
        ],
    )
    def test_they_go_round_the_processor(self, kind: Any, key: str):
        data = torch.ones(2, 7, 16)
        items = kind(data, expected_hidden_size=16)
        assert items.get_processor_data() == {}
        assert items.get_passthrough_data()[key] is data
        assert (items.get_count(), items.get_feature_size(0)) == (2, 7)
        assert items.select([1]).get_count() == 1
        assert items.get_item_for_hash(1).shape == (7, 16)

    def test_each_row_of_two_axes_counts(self):
        items = EmbeddingItems(np.ones((10, 768)), "image")
        assert items.get_count() == 10
        assert items.select([1, 2]).get_count() == 2

    def test_an_item_known_by_its_uuid_alone(self):
        items = EmbeddingItems([jnp.ones((7, 16)), None], "image")
        assert items.get(1) is None
        with pytest.raises(RequestValueError, match="cached"):
            items.get_feature_size(1)

    @pytest.mark.parametrize(
        ("data", "hidden", "error", "message"),
        [
            (np.ones(3), None, RequestValueError, "must be 2D .* 3D"),
            (np.ones((1, 2, 3, 4)), None, RequestValueError, "must be 2D .* 3D"),
            ([np.ones((2, 3)), np.ones((1, 2, 3))], None, RequestValueError, "at index 1"),
            ([np.ones(3)], 8, RequestValueError, "must be 2D .* 3D"),
            ([np.ones((2, 8)), np.ones((2, 9))], 8, RequestValueError, "mismatch: got 9, .* has 8"),
            (np.ones((2, 7, 16)), 8, RequestValueError, "mismatch: got 16, the model has 8"),
            ([np.ones((2, 9)), np.ones(9)], 8, RequestValueError, "must be 2D"),
            ([np.ones((2, 8)), [1.0]], None, RequestTypeError, "`list` at index 1"),
            (np.ones((2, 8), np.int64), 8, RequestTypeError, "dtype is int64; give one of float32"),
            (np.full((2, 8), "a"), 8, RequestTypeError, "dtype is <U1"),
            (torch.ones(2, 8, dtype=torch.complex64), 8, RequestTypeError, "is complex64"),
            (torch.ones(2, 8).to_sparse(), 8, RequestTypeError, "give a dense array"),
            ([np.ones((2, 8)), np.full((2, 8), np.nan)], 8, RequestValueError, "1: some .* NaN"),
            (jnp.full((1, 2, 8), jnp.inf, jnp.bfloat16), 8, RequestValueError, "infinite"),
        ],
    )
    def test_axes_are_checked_first_then_the_width_and_the_values(
        self, data: Any, hidden: int | None, error: type[Exception], message: str
    ):
        with pytest.raises(error, match=message):
            EmbeddingItems(data, "image", expected_hidden_size=hidden)


class TestDicts:
    @pytest.mark.parametrize("bad", [np.nan, 1j, "a"])
    def test_values_are_finite_floats(self, bad: Any):
        embeds = np.full(ROWS.shape, bad)
        with pytest.raises(RequestError, match="`image_embeds`: "):
            GridParser().parse_mm_data({"image": {"image_embeds": embeds, "image_grid_thw": GRID}})

    @pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, torch.from_numpy])
    def test_a_dict_divides_by_its_sizes(self, convert: Any):
        data = {"image_embeds": convert(ROWS), "image_grid_thw": convert(GRID), "more": 1}
        items = GridParser(expected_hidden_size=8).parse_mm_data({"image": data})["image"]
        assert isinstance(items, DictEmbeddingItems)
        assert len(items) == 2
        for index, rows in enumerate((ROWS[:4], ROWS[4:])):
            assert items.get(index).keys() == set(FIELDS)
            np.testing.assert_array_equal(items.get(index)["image_embeds"], rows)
            np.testing.assert_array_equal(items.get(index)["image_grid_thw"], GRID[index])
        assert items.get_processor_data() == {}
        assert items.get_passthrough_data().keys() == set(FIELDS)
        assert items.get_passthrough_data()["image_embeds"] is data["image_embeds"]
        swapped = items.select([1, 0])
        assert len(swapped) == 2
        np.testing.assert_array_equal(swapped.get(1)["image_embeds"], ROWS[:4])
        assert len(items.select([])) == 0

    def test_values_may_be_missing_where_that_is_allowed(self):
        data = {"image_grid_thw": GRID}
        with pytest.raises(RequestValueError, match=r"should contain the fields .*image_embeds"):
            GridParser().parse_mm_data({"image": data})
        items = GridParser(allow_missing_mm_embeddings=True).parse_mm_data({"image": data})
        assert items.get_all_counts() == {"image": 2}
        with pytest.raises(RequestValueError, match="should contain the fields"):
            GridParser(allow_missing_mm_embeddings=True).parse_mm_data({"image": {"x": 1}})

    def test_a_dict_is_no_picture_where_the_family_takes_none(self):
        with pytest.raises(RequestTypeError, match="has the type `dict`"):
            MultiModalDataParser().parse_mm_data({"image": {"image_embeds": ROWS}})

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"image_embeds": ROWS}, "should contain the fields"),
            ({"image_embeds": None, "image_grid_thw": GRID}, "must be an array"),
            ({"image_embeds": ROWS.tolist(), "image_grid_thw": GRID}, "must be an array"),
            ({"image_embeds": ROWS[:, :4], "image_grid_thw": GRID}, "mismatch: got 4, .* has 8"),
            ({"image_embeds": ROWS[:5], "image_grid_thw": GRID}, "has 5 rows, its items have 7"),
            ({"image_embeds": ROWS, "image_grid_thw": GRID[:1]}, "has 7 rows, its items have 4"),
            ({"image_embeds": ROWS, "image_grid_thw": GRID[0]}, "do not divide into items"),
            ({"image_embeds": ROWS, "image_grid_thw": 7}, "do not divide into items"),
            ({"image_embeds": ROWS, "image_grid_thw": -GRID}, "do not divide into items"),
            ({"image_embeds": ROWS, "image_grid_thw": "abc"}, "do not divide into items"),
        ],
    )
    def test_tensors_that_do_not_fit_are_refused(self, data: Any, message: str):
        with pytest.raises(RequestError, match=message):
            GridParser(expected_hidden_size=8).parse_mm_data({"image": data})

    def test_a_dict_of_ones_own_goes_whole(self):
        data = {"image_embeds": ROWS, "image_grid_thw": GRID, "more": 1}
        items = DictEmbeddingItems(data, "image", set(FIELDS), grid_fields)
        assert items.get_passthrough_data() is data
        assert len(items.select([])) == 0

    def test_a_factory_knows_every_field(self):
        data = {"image_embeds": ROWS, "image_grid_thw": GRID}
        with pytest.raises(ValueError, match="at least one required field"):
            DictEmbeddingItems(data, "image", set(), grid_fields)
        with pytest.raises(ValueError, match=r"must know .*more"):
            DictEmbeddingItems(data, "image", {"image_embeds"}, grid_fields, {"more"})
        with pytest.raises(NotImplementedError, match="MultiModalDataParser says nothing"):
            MultiModalDataParser()._get_embedding_fields_config("image", data)
