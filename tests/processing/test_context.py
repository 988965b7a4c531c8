"""Merging processor kwargs, and what a wrong configuration raises."""

from typing import Any

import pytest

from mmjax.processing import InputProcessingContext
from mmjax.processing.context import merge_mm_kwargs
from tests.processing.families import gemma3


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([{"a": 1}, {"a": 2}], {"a": 2}),
        ([{"a": 1, "images_kwargs": {"a": 2}}], {"images_kwargs": {"a": 2}}),
        ([{"images_kwargs": {"a": 2}}, {"a": 3}], {"images_kwargs": {}, "a": 3}),
        ([{"a": 1}, {"images_kwargs": {"a": 2}}], {"images_kwargs": {"a": 2}}),
        (
            [{"images_kwargs": {"size": {"h": 1, "w": 1}}}, {"images_kwargs": {"size": {"h": 2}}}],
            {"images_kwargs": {"size": {"h": 2, "w": 1}}},
        ),
        ([{"size": {"h": 1}}, {"size": {"w": 2}}], {"size": {"h": 1, "w": 2}}),
        ([{"images_kwargs": None}], {}),
    ],
)
def test_later_and_scoped_kwargs_win(levels: list[dict[str, Any]], expected: dict[str, Any]):
    assert merge_mm_kwargs(*levels) == expected
    assert merge_mm_kwargs() == {}


def test_merging_does_not_change_what_is_merged():
    operator = {"images_kwargs": {"a": 1}, "size": {"h": 1}}
    merge_mm_kwargs(operator, {"a": 2, "size": {"h": 3}})
    assert operator == {"images_kwargs": {"a": 1}, "size": {"h": 1}}


def test_a_wrong_config_type_is_named():
    context = InputProcessingContext(model_config=gemma3.model_config(), tokenizer=None)
    assert context.get_hf_config() is context.model_config.hf_config
    with pytest.raises(TypeError, match="is a `Gemma3Config`, expected `int`"):
        context.get_hf_config(int)
