"""The ids of items: one or many, with data or in place of it."""

from typing import Any

import numpy as np
import pytest

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.processing import (
    AudioProcessorItems,
    EmbeddingItems,
    ImageProcessorItems,
    MultiModalDataItems,
    VideoProcessorItems,
)
from mmjax.processing.items.parse import complete_mm_data, parse_mm_uuids, validate_mm_uuids
from tests.kit import draw

PICTURE = draw(1, 1)


def items(**data: Any) -> MultiModalDataItems:
    kinds: dict[str, Any] = {"image": ImageProcessorItems, "video": VideoProcessorItems}
    kinds["audio"] = AudioProcessorItems
    return MultiModalDataItems({name: kinds[name](rows) for name, rows in data.items()})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"image": None}, {}),
        ({"image": "a"}, {"image": ["a"]}),
        ({"image": []}, {"image": []}),
        ({"image": ("a", None)}, {"image": ["a", None]}),
        ({"image": "a", "audio": ["b", None]}, {"image": ["a"], "audio": ["b", None]}),
    ],
)
def test_one_or_many(given: Any, expected: dict[str, list[str | None]]):
    assert parse_mm_uuids(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": 7}, r"\['image'\] has the type `int`"),
        ({"image": b"a"}, r"\['image'\] has the type `bytes`"),
        ({"image": {"a"}}, r"\['image'\] has the type `set`"),
        ({"image": ["a", 7]}, r"\['image'\]\[1\] has the type `int`"),
    ],
)
def test_a_uuid_is_text(given: Any, message: str):
    with pytest.raises(RequestTypeError, match=message):
        parse_mm_uuids(given)


@pytest.mark.parametrize(
    ("data", "uuids"),
    [
        ({}, {}),
        ({"image": []}, {}),
        ({"image": []}, {"image": []}),
        ({"image": [PICTURE]}, {}),
        ({"image": [PICTURE, None]}, {"image": [None, "b"]}),
        ({"image": [PICTURE], "audio": [None]}, {"audio": ["b"]}),
        ({"video": [None, [PICTURE]]}, {"video": ["a", "b"]}),
    ],
)
def test_every_item_has_data_or_a_uuid(data: Any, uuids: Any):
    validate_mm_uuids(items(**data), uuids)


@pytest.mark.parametrize(
    ("data", "uuids", "message"),
    [
        ([PICTURE, None], {"image": ["a"]}, "must have same length as .*: 1 uuids for 2 items"),
        ([PICTURE], {"image": []}, "must have same length as .*: 0 uuids for 1 items"),
        ([PICTURE, None], {"image": ["a", None]}, r"\['image'\]\[1\] is empty but .* missing"),
        ([PICTURE, None], {}, r"\['image'\]\[1\] is empty but .* is missing"),
        ([PICTURE], {"audio": ["a"]}, r"multi_modal_data has none; give \[None\] \* 1"),
    ],
)
def test_mismatches(data: Any, uuids: Any, message: str):
    with pytest.raises(RequestValueError, match=message):
        validate_mm_uuids(items(image=data), uuids)


def test_embeddings_have_uuids_too():
    embeds = MultiModalDataItems({"image": EmbeddingItems([np.ones((2, 3)), None], "image")})
    validate_mm_uuids(embeds, {"image": [None, "b"]})
    with pytest.raises(RequestValueError, match="is empty but"):
        validate_mm_uuids(embeds, {})


def test_a_modality_without_data_stands_for_its_uuids():
    data = {"image": None, "audio": [1.0], "video": None}
    uuids = {"image": ["a", "b"], "video": "c"}
    assert complete_mm_data(data, uuids) == {
        "image": [None, None],
        "audio": [1.0],
        "video": [None],
    }
    assert complete_mm_data({"image": []}, None) == {"image": []}
    for missing in (None, {}, {"image": None}, {"audio": "a"}):
        with pytest.raises(RequestValueError, match=r"\['image'\] is empty but .* is missing"):
            complete_mm_data({"image": None}, missing)
