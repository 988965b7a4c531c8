"""Transforms in numpy and Pillow, against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.errors import RequestError
from mmjax.processing import ImageSize
from mmjax.processing.image_processors.image import (
    check_pixel_size,
    check_resized_pixels,
    check_squared_pixels,
    fit_within,
    patchify,
    to_pixels,
)
from tests.kit import draw

SIDES = st.integers(1, 5000)


@given(width=SIDES, height=SIDES, limit_width=SIDES, limit_height=SIDES)
def test_what_fits_stays_and_what_does_not_is_scaled_by_one_factor(
    width: int, height: int, limit_width: int, limit_height: int
):
    size, limit = ImageSize(width, height), ImageSize(limit_width, limit_height)
    fitted = fit_within(size, limit)
    if width <= limit_width and height <= limit_height:
        assert fitted == size
        return
    assert fitted.width <= limit_width
    assert fitted.height <= limit_height
    scale = min(limit_width / width, limit_height / height)
    np.testing.assert_array_equal(fitted, np.floor(np.multiply(size, scale)))


def test_pixels_are_channels_first():
    image = draw(5, 3)
    pixels = to_pixels(image)
    assert pixels.shape == (3, 3, 5)
    assert pixels.dtype == np.uint8
    assert tuple(pixels[:, 2, 4]) == image.getpixel((4, 2))


def test_patches_come_row_by_row_with_channels_last():
    pixels = np.arange(3 * 4 * 6).reshape(3, 4, 6)
    patches = patchify(pixels, 2, 3)
    assert patches.shape == (4, 18)
    np.testing.assert_array_equal(patches[1].reshape(2, 3, 3), np.moveaxis(pixels, 0, -1)[:2, 3:])
    np.testing.assert_array_equal(patches[2].reshape(2, 3, 3), np.moveaxis(pixels, 0, -1)[2:, :3])


def test_pixels_of_another_size_are_refused():
    check_pixel_size(np.zeros((2, 3, 8, 6)), 8, 6)
    with pytest.raises(RequestError, match=r"became 6x8 pixels .* takes 8x6; leave"):
        check_pixel_size(np.zeros((2, 3, 6, 8)), 8, 6)


def test_only_slivers_grow_into_bombs():
    check_resized_pixels([draw(100, 10)], 56, 56 * 560)
    check_resized_pixels([draw(100, 1)], None, 1)  # both sides are given: nothing grows
    with pytest.raises(RequestError, match=r"100x10 pixels; .* side is 56 it has 31360, at most"):
        check_resized_pixels([draw(10, 10), draw(100, 10)], 56, 56 * 560 - 1)


def test_only_long_pictures_grow_into_bombs_when_they_are_squared():
    check_squared_pixels([draw(100, 10)], 10_000)
    with pytest.raises(RequestError, match=r"10x101 .* padded to a square it has 10201, at most"):
        check_squared_pixels([draw(10, 101)], 10_000)
