"""Kwargs for HF processors: whose win, and which no request may bring, trusted or not."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from mmjax.cache.media.processor_cache import get_item_size
from mmjax.decoders.limits import MediaLimits
from mmjax.errors import RequestError, RequestTypeError
from mmjax.processing.hf_call import check_known_kwargs, check_sizes, merge_mm_kwargs
from tests.families import FAMILIES
from tests.kit import draw

LIMITS = MediaLimits(max_image_pixels=10_000, max_video_pixels=20_000)


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


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"images": []}, "`images`, which the server sets itself"),
        (
            {"images_kwargs": {"return_tensors": "pt"}},
            "`images_kwargs.return_tensors`, which the s",
        ),
        ({"padding": "max_length"}, "`padding`, which is the tokenizer's"),
        ({"text_kwargs": {"max_length": 10**9}}, "`text_kwargs.max_length`, which is the token"),
        ({"pad_to_multiple_of": 10**9}, "`pad_to_multiple_of`, which is the tokenizer's"),
        ({"images_kwargs": 5}, "a `int` as `images_kwargs`; give a dict"),
        ({"videos_kwargs": []}, "a `list` as `videos_kwargs`; give a dict"),
    ],
)
def test_what_no_request_may_set(kwargs: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message) as caught:
        check_known_kwargs(kwargs, None)
    assert caught.value.param == "mm_processor_kwargs"
    assert isinstance(caught.value, RequestTypeError) == ("give a dict" in message)


def test_scopes_may_be_empty():
    scopes = {"images_kwargs": None, "videos_kwargs": {}, "text_kwargs": {"a": 1}}
    check_known_kwargs(scopes, None)


@pytest.mark.parametrize(
    ("size", "num_pixels"),
    [
        ({"height": 100, "width": 100}, 0),
        ({"height": 101, "width": 100}, 10_100),
        ({"max_height": 200, "max_width": 100}, 20_000),
        ((200, 100), 20_000),
        (50, 0),
        (51, 10_404),
        ({"shortest_edge": 51}, 10_404),
        ({"shortest_edge": 51, "longest_edge": 100}, 0),
        ({"longest_edge": 101}, 10_201),
        ({"shortest_edge": 10, "height": 10**6, "width": 10**6}, 10**12),
        ({"height": 10**400, "width": 10**400}, 10**18),
        ({"height": float("inf"), "width": float("nan")}, 0),
        ({"height": "a", "width": None}, 0),
        ({"height": -(10**6), "width": -(10**6)}, 0),
        ("large", 0),
        ([1, 2, 3], 0),
    ],
)
def test_pixels_are_counted_before_any_is_made(size: Any, num_pixels: int):
    """Of a picture of 40x10; 0: nothing is wrong, or HF says so."""
    for kwargs in ({"size": size}, {"images_kwargs": {"pad_size": size}}, {"crop_size": size}):
        if not num_pixels:
            check_sizes({"images": [draw(40, 10)]}, kwargs, LIMITS)
            continue
        with pytest.raises(RequestError, match=f"makes {num_pixels} pixels of 40x10, at most"):
            check_sizes({"images": [draw(40, 10)]}, kwargs, LIMITS)


def test_all_frames_of_a_video_count():
    video = np.zeros((5, 10, 20, 3), np.uint8)
    kwargs = {"videos_kwargs": {"size": {"height": 60, "width": 60}}}
    check_sizes({"images": [draw(20, 10)], "videos": [video]}, kwargs, LIMITS)
    for many in ([video, np.repeat(video, 2, 0)], [(np.repeat(video, 2, 0), {"fps": 1})]):
        with pytest.raises(RequestError, match="makes 36000 pixels of 20x10, at most 20000"):
            check_sizes({"videos": many}, kwargs, LIMITS)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_makes_bombs(name: str):
    family = FAMILIES[name]
    processor = family.make_processor(trust_request_mm_kwargs=True)
    prompt = family.placeholder or "a"
    for kwargs in (
        {"size": {"height": 8000, "width": 8000}},
        {"images_kwargs": {"size": {"height": 8000, "width": 8000}}},
        {"size": {"shortest_edge": 10**9, "longest_edge": 10**9}},
        {"size": 8000},
    ):
        image = {"image": draw(90, 10)}
        if family.has_pixel_counts and "height" in str(kwargs):
            inputs = processor.apply(prompt, image, hf_processor_mm_kwargs=kwargs)
            assert get_item_size(inputs.mm_kwargs["image"][0]) < 10**6
            continue
        with pytest.raises(RequestError) as caught:
            processor.apply(prompt, image, hf_processor_mm_kwargs=kwargs)
        assert str(caught.value.param).startswith("mm_processor_kwargs")
        assert "became" not in caught.value.message, "it was made before it was refused"


def test_code_comes_from_the_checkpoint_alone(monkeypatch: pytest.MonkeyPatch):
    """Names by which HF loads code or files mean nothing in a request."""
    processors = {name: family.make_processor() for name, family in FAMILIES.items()}
    for name, processor in processors.items():
        processor.apply(FAMILIES[name].placeholder or "a", {"image": draw(60, 40)})
    monkeypatch.setattr("transformers.dynamic_module_utils.get_cached_module_file", pytest.fail)
    monkeypatch.setattr("transformers.utils.hub.cached_files", pytest.fail)
    kwargs = {"trust_remote_code": True, "code_revision": "x", "revision": "y", "subfolder": "z"}
    for name, processor in processors.items():
        prompt = FAMILIES[name].placeholder or "a"
        with pytest.raises(RequestError, match="has `trust_remote_code`, which this model's"):
            processor.apply(prompt, {"image": draw(60, 40)}, hf_processor_mm_kwargs=kwargs)


def test_importing_processors_leaves_pillows_bomb_check_as_it_is():
    names = ", ".join(
        f"mmjax.models.{name}.processor" for name in {family.folder for family in FAMILIES.values()}
    )
    code = (
        "from PIL import Image, ImageFile; known = Image.MAX_IMAGE_PIXELS;"
        f"import {names};"
        "assert known == Image.MAX_IMAGE_PIXELS == 89478485;"
        "assert not ImageFile.LOAD_TRUNCATED_IMAGES"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
