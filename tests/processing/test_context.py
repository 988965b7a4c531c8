"""Merging processor kwargs, limits, dummy inputs, the registry's decorator."""

from typing import Any

import pytest
from PIL import Image

from mmjax.processing import ImageDummyOptions, InputProcessingContext
from mmjax.processing.context import merge_mm_kwargs
from tests.processing.families import gemma3
from tests.processing.test_processor import make


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


def test_limits_are_the_operators_capped_by_the_models():
    info = gemma3.make_processor(limit_mm_per_prompt={"image": 2}).info
    assert info.allowed_mm_limits == {"image": 2}
    with pytest.raises(ValueError, match=r"At most 2 image\(s\).*--limit-mm-per-prompt"):
        info.validate_num_items("image", 3)
    assert make().info.allowed_mm_limits == {"image": 5}


def test_dummy_images_repeat_one_object_and_only_shrink(caplog: pytest.LogCaptureFixture):
    builder = make().dummy_inputs
    options = {"image": ImageDummyOptions(width=5, height=99)}
    first, second = builder.get_dummy_mm_data(10, {"image": 2}, options)["image"]
    assert first is second
    assert isinstance(first, Image.Image)
    assert first.size == (5, 4)
    assert first.getpixel((0, 0)) == (255, 255, 255)
    assert "dummy height 99 is above the model's 4" in caplog.text
    assert builder.get_dummy_mm_data(10, {"image": 0})["image"] == []
