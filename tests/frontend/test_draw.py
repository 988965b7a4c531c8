"""Boxes and polygons of a parsed answer are drawn on a copy of its image."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

import mmjax

TRIANGLE = [10, 10, 50, 10, 50, 40]


def drawn(parsed: Any) -> np.ndarray:
    """Return bool[Y, X]: which pixels of a black image have changed."""
    image = Image.new("RGB", (90, 60))
    canvas = mmjax.draw_boxes(image, parsed)
    assert canvas.size == image.size
    assert image.getextrema() == ((0, 0),) * 3, "the image itself is as it was"
    return np.asarray(canvas).max(-1) > 0


@pytest.mark.parametrize(
    "answer",
    [
        {"bboxes": [[10, 10, 50, 40]], "labels": [""]},
        {"quad_boxes": [[10, 10, 50, 10, 50, 40, 10, 40]], "labels": [""]},
        {"polygons": [[[10, 10, 50, 10, 50, 40, 10, 40]]], "labels": [""]},
        {
            "bboxes": [],
            "bboxes_labels": [],
            "polygons": [[[10, 10, 50, 10, 50, 40, 10, 40], [3, 4], []]],
            "polygons_labels": [""],
        },
    ],
)
def test_a_box_is_drawn_along_its_sides(answer: dict[str, Any]) -> None:
    pixels = drawn({"<OD>": answer})
    assert pixels[10, 10:51].all()
    assert pixels[10:41, 50].all()
    assert pixels[40, 10:51].all()
    assert pixels[10:41, 10].all()
    assert not pixels[15:35, 15:45].any()
    assert not pixels[:8].any()


def test_the_last_point_of_a_polygon_is_joined_to_the_first() -> None:
    pixels = drawn({"<X>": {"polygons": [[TRIANGLE]], "labels": [""]}})
    assert pixels[25, 30]
    assert not pixels[38, 12:20].any()


def test_a_point_is_a_dot() -> None:
    pixels = drawn({"points": {"points": [[40.0, 30.0]], "labels": [""], "images": [1]}})
    assert pixels[28:33, 38:43].all()
    assert pixels.sum() < 100


def test_labels_have_a_color_each() -> None:
    boxes = [[5, 30, 20, 55], [30, 30, 50, 55], [60, 30, 80, 55]]
    image = Image.new("RGB", (90, 60))
    canvas = mmjax.draw_boxes(image, {"<OD>": {"bboxes": boxes, "labels": ["a", "b", "a"]}})
    first, second, third = (canvas.getpixel((right, 50)) for _, _, right, _ in boxes)
    assert first == third != second


@pytest.mark.parametrize("parsed", [None, {}, {"<CAPTION>": "a cat"}])
def test_of_a_text_nothing_is_drawn(parsed: Any) -> None:
    assert not drawn(parsed).any()
