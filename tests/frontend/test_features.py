"""Items as the engine gets them: named, in order, each tensor once."""

from typing import Any

import pytest

from mmjax.errors import RequestError
from mmjax.frontend.prompt.committer import build_features
from mmjax.processing.tensors.inputs import (
    MultiModalInputs,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)


@pytest.mark.parametrize(
    ("lora_name", "enable_tower_connector_lora", "identifier"),
    [(None, False, "ab"), (None, True, "ab"), ("poet", False, "ab"), ("poet", True, "poet:ab")],
)
def test_only_an_adapter_of_the_tower_enters_the_name(
    lora_name: str | None, enable_tower_connector_lora: bool, identifier: str
) -> None:
    (feature,) = build_features(
        inputs_of([MultiModalKwargsItem.dummy(3)], ["ab"]),
        lora_name=lora_name,
        enable_tower_connector_lora=enable_tower_connector_lora,
    )
    assert feature.identifier == identifier
    assert feature.mm_hash == "ab", "the tensors are the same for all adapters"


def inputs_of(items: list[MultiModalKwargsItem | None], hashes: list[Any]) -> MultiModalInputs:
    """Place items backwards, so that their order in the prompt is not that of the user."""
    return MultiModalInputs(
        prompt_token_ids=[0] * 9 * len(items),
        mm_kwargs=MultiModalKwargsItems({"image": items}),
        mm_hashes={"image": hashes},
        mm_placeholders={
            "image": [PlaceholderRange(9 * (len(items) - n), 4) for n in range(len(items))]
        },
    )


def test_items_come_in_the_order_of_the_prompt_and_tensors_once() -> None:
    a, b = MultiModalKwargsItem.dummy(3), MultiModalKwargsItem.dummy(4)
    features = build_features(inputs_of([a, b, a, None, a], ["a", "b", "a", "c", "a"]))
    assert [feature.mm_hash for feature in features] == ["a", "c", "a", "b", "a"]
    assert [feature.mm_position.offset for feature in features] == [9, 18, 27, 36, 45]
    assert features[0].data is a
    assert features[3].data is b
    assert [feature.data is None for feature in features] == [False, True, True, False, True]


def test_items_that_are_not_one_object_both_come() -> None:
    items: list[MultiModalKwargsItem | None] = [MultiModalKwargsItem.dummy(3) for _ in range(2)]
    features = build_features(inputs_of(items, ["a", "a"]))
    assert all(feature.data is not None for feature in features)


def test_a_hash_is_a_text() -> None:
    hashes: list[Any] = ["a", "b"]
    inputs = inputs_of([None, None], hashes)
    hashes[1] = 3
    with pytest.raises(RequestError, match="image 1 is a int"):
        build_features(inputs)
