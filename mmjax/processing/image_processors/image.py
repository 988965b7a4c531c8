"""Images -> arrays as HF's PIL image processors make them, in numpy and Pillow alone.

For families whose HF class needs torch, and checks that several families share.
"""

import math
from typing import Any

import numpy as np
from PIL import Image

from mmjax.errors import RequestValueError
from mmjax.processing.items.items import ImageSize


def to_pixels(image: Image.Image) -> np.ndarray:
    """Return an RGB image as uint8[3, height, width]."""
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return np.moveaxis(np.asarray(rgb), -1, 0)


def fit_within(size: ImageSize, limit: ImageSize) -> ImageSize:
    """Return the size, scaled down if either side is longer than the limit's; never up."""
    if size.width <= limit.width and size.height <= limit.height:
        return size
    scale = min(limit.height / size.height, limit.width / size.width)
    return ImageSize(width=int(size.width * scale), height=int(size.height * scale))


def fit_pixels(size: ImageSize, rounded: ImageSize, unit: int, least: int, most: int) -> ImageSize:
    """Return whole units close to a size's shape, of `least` to `most` pixels (`smart_resize`).

    `rounded`: the size in whole units, which is returned where it has as many.
    """
    width, height = size
    if math.prod(rounded) > most:
        shrink = math.sqrt(width * height / most)
        return ImageSize(*(max(unit, math.floor(side / shrink / unit) * unit) for side in size))
    if math.prod(rounded) < least:
        grow = math.sqrt(least / (width * height))
        return ImageSize(*(math.ceil(side * grow / unit) * unit for side in size))
    return rounded


def patchify(
    pixels: np.ndarray, patch_height: int, patch_width: int, *, colours_first: bool = False
) -> np.ndarray:
    """Cut [C, height, width] into [patches, patch_height * patch_width * C], row by row.

    With `colours_first` a patch's values come by channel, row and column.
    """
    channels, height, width = pixels.shape
    rows, columns = height // patch_height, width // patch_width
    assert (rows * patch_height, columns * patch_width) == (height, width), f"{pixels.shape=}"
    patches = pixels.reshape(channels, rows, patch_height, columns, patch_width)
    order = (1, 3, 0, 2, 4) if colours_first else (1, 3, 2, 4, 0)
    return patches.transpose(order).reshape(rows * columns, -1)


def bad_kwarg(name: str, value: object, expected: str) -> RequestValueError:
    """Return the error of a kwarg that no processor can take; `expected` ends "it must be"."""
    return RequestValueError(
        f"`{name}` is {value!r} in mm_processor_kwargs; it must be {expected}",
        param="mm_processor_kwargs",
    )


def sliver_error(size: ImageSize, longest: int) -> RequestValueError:
    """Return the error of an image of which nothing would be left, scaled to a longest side."""
    return RequestValueError(
        f"image is {size.width}x{size.height} pixels; scaled until its longer side is {longest}, "
        "the shorter has none: crop it",
        param="multi_modal_data",
    )


def check_count(name: str, value: Any, most: int, noun: str) -> int:
    """Return a kwarg that is a number of tiles, say, from 1 to `most`; `RequestValueError` else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise bad_kwarg(name, value, f"a number of {noun} from 1 to {most}")
    return value


def check_bool(name: str, value: Any) -> bool:
    """Return a kwarg that is true or false; `RequestValueError` else."""
    if not isinstance(value, bool):
        raise bad_kwarg(name, value, "true or false")
    return value


def check_pixel_size(pixel_values: Any, height: int, width: int) -> None:
    """Refuse pixels of another size than the vision tower takes: [..., height, width]."""
    found = np.shape(pixel_values)[-2:]
    if found != (height, width):
        raise RequestValueError(
            f"images became {found[0]}x{found[1]} pixels (height x width), but the vision tower "
            f"takes {height}x{width}; leave `size`, `crop_size`, `do_resize` and `do_center_crop` "
            "out of mm_processor_kwargs",
            param="mm_processor_kwargs",
        )


def check_resized_pixels(images: Any, shortest_edge: int | None, max_pixels: int) -> None:
    """Refuse images so long that scaling their short side up to `shortest_edge` is a bomb."""
    if shortest_edge is None:
        return
    for image in images:
        resized = shortest_edge * int(shortest_edge * max(image.size) / min(image.size))
        _check_pixels(image, resized, f"scaled until its short side is {shortest_edge}", max_pixels)


def check_squared_pixels(images: Any, max_pixels: int) -> None:
    """Refuse images so long that padding them to a square is a bomb."""
    for image in images:
        _check_pixels(image, max(image.size) ** 2, "padded to a square", max_pixels)


def _check_pixels(image: Image.Image, num_pixels: int, when: str, max_pixels: int) -> None:
    if num_pixels > max_pixels:
        width, height = image.size
        raise RequestValueError(
            f"image is {width}x{height} pixels; {when} it has {num_pixels}, at most {max_pixels} "
            "are accepted: crop it, or scale it down",
            param="multi_modal_data",
        )
