"""MiniCPM-OCR's pictures: whether a small one is scaled up depends on the letters that it shows.

As HF's `MiniCPMOcrImageProcessor`, which needs torchvision and OpenCV; here Pillow scales, and
scipy finds what is connected. Letters are dark on light, or light on dark: what Otsu's threshold
(1979) parts into less than half of the picture.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from mmjax.errors import CheckpointError
from mmjax.models.minicpmv4_6.slices import SliceCutter
from mmjax.processing.image_processors.affine import ARITHMETIC, read_affine
from mmjax.processing.image_processors.image import bad_kwarg, to_pixels

_ALWAYS, _NEVER, _ADAPTIVE = "always", "never", "adaptive"
_TINY_SIDE = 84
"""Of the square whose pixels tiny pictures are scaled to."""
_TINY_PIXELS = 6272
_SMALL_LETTERS = 12.0
"""Pixels of their height, in the median."""
_DENSE_LETTERS = 2.0
"""In a thousand pixels."""
_LUMA = (19595, 38470, 7471)
"""Shares of red, green and blue in 65,536ths (ITU-R 601-2), as Pillow's."""


class GlyphCutter(SliceCutter):
    """The part for images, of which small ones and their slices may keep their size."""

    valid_kwargs = SliceCutter.valid_kwargs | {"small_image_upsize"}
    least_scale = 2  # so that no slice of the largest picture is small

    def __init__(self, hf_processor: Any, *, settings: Mapping[str, Any], **sizes: Any) -> None:
        """`settings`: the checkpoint's of images."""
        super().__init__(hf_processor, **sizes)
        self.upsize = settings.get("small_image_upsize", _ALWAYS)
        if self.upsize not in (_ALWAYS, _NEVER, _ADAPTIVE):
            raise CheckpointError(
                f"`small_image_upsize` of the image processor is {self.upsize!r}; mmjax knows "
                f"`{_ALWAYS}`, `{_NEVER}` and `{_ADAPTIVE}`"
            )
        if hf_processor.scale_resolution < _TINY_SIDE:
            raise CheckpointError(
                f"`scale_resolution` of the image processor is {hf_processor.scale_resolution}; "
                f"it must be {_TINY_SIDE} or more, which tiny pictures are scaled to"
            )
        self.affine = read_affine({name: getattr(hf_processor, name) for name in ARITHMETIC})

    def cut(self, image: Image.Image, most: int, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the same as HF's; `RequestValueError` for a kwarg that none can be cut by."""
        upsize = kwargs.get("small_image_upsize") or self.upsize
        if upsize not in (_ALWAYS, _NEVER, _ADAPTIVE):
            expected = f"`{_ALWAYS}`, `{_NEVER}` or `{_ADAPTIVE}`"
            raise bad_kwarg("small_image_upsize", upsize, expected)
        if upsize == _ALWAYS:
            return super().cut(image, most, kwargs)
        image = image if image.mode == "RGB" else image.convert("RGB")
        grid = None
        if most > 1:
            size = (image.height, image.width)
            grid = self.hf.get_sliced_grid(size, most, self.hf.scale_resolution)
        if grid is None:
            units = [self._scale(image, upsize)]
        else:
            units = [self._scale(image, _NEVER), *self._cut_slices(image, grid, upsize)]
        side = self.hf.patch_size
        pixels = [self.hf.reshape_by_patch(to_pixels(unit), side) for unit in units]
        sizes = [(unit.height // side, unit.width // side) for unit in units]
        return {
            "pixel_values": np.concatenate(pixels, axis=-1)[None],
            "target_sizes": np.array(sizes, np.int32),
            "grids": [grid or [0, 0]],
            "image_affine": self.affine,
        }

    def _scale(self, image: Image.Image, upsize: str) -> Image.Image:
        """Return a picture that is not cut, or the whole of one that is."""
        side = find_upsize(image, self.hf.scale_resolution) if upsize == _ADAPTIVE else None
        height, width = self._find_size(image, side)
        return image.resize((width, height), self.hf.resample)

    def _find_size(self, image: Image.Image, side: int | None) -> tuple[int, int]:
        """Return the rows and columns of pixels; `side`: None: it is not scaled up."""
        return self.hf.find_best_resize(
            (image.height, image.width),
            side or self.hf.scale_resolution,
            self.hf.patch_size,
            self.hf.downsample_mode,
            allow_upscale=side is not None,
        )

    def _cut_slices(
        self, image: Image.Image, grid: Sequence[int], upsize: str
    ) -> list[Image.Image]:
        """Return the slices of a picture, row by row."""
        rows, columns = grid
        rest = (self.hf.scale_resolution, self.hf.patch_size, self.hf.downsample_mode)
        size = (image.height, image.width)
        whole = self.hf.get_refine_size(size, grid, *rest, allow_upscale=True)
        refined = image.resize(whole[::-1], self.hf.resample)
        height, width = whole[0] // rows, whole[1] // columns
        slices = []
        for row in range(rows):
            for column in range(columns):
                place = (column * width, row * height)
                base = refined.crop((*place, place[0] + width, place[1] + height))
                cell = _crop_cell(image, grid, (row, column)) if upsize == _ADAPTIVE else base
                slices.append(base if cell is base else self._choose(cell, base))
        return slices

    def _choose(self, cell: Image.Image, base: Image.Image) -> Image.Image:
        """Return a slice, or what is there of the picture where that takes fewer patches."""
        side = self.hf.scale_resolution
        if not 0 < cell.width * cell.height <= side**2:
            return base
        found = find_upsize(cell, side)
        if found == side:
            return base
        height, width = self._find_size(cell, found)
        if height * width >= base.height * base.width:
            return base
        # Bicubic, whatever the settings' filter is.
        return cell.resize((width, height), Image.Resampling.BICUBIC)


def find_upsize(image: Image.Image, side: int) -> int | None:
    """Return the side of the square whose pixels an RGB picture is scaled up to; None: it is not.

    `side`: of small letters that are dense. Tiny pictures without such are scaled up to another.
    """
    heights = _find_letters(np.asarray(image))
    density = len(heights) * 1000.0 / (image.width * image.height)
    is_small = len(heights) > 0 and float(np.median(heights)) <= _SMALL_LETTERS
    if is_small and density >= _DENSE_LETTERS:
        return side
    return _TINY_SIDE if image.width * image.height < _TINY_PIXELS else None


def _find_letters(pixels: np.ndarray) -> np.ndarray:
    """Return int[letters]: the height of each; `pixels`: uint8[height, width, 3]."""
    # On use only: few checkpoints ask for it.
    from scipy import ndimage

    gray = ((pixels.astype(np.int32) @ _LUMA + 32768) >> 16).astype(np.uint8)
    is_letter = gray <= find_threshold(gray)
    if is_letter.mean() > 0.5:
        is_letter = ~is_letter
    found: Any = ndimage.label(is_letter, np.ones((3, 3)))  # all eight neighbours
    labels = found[0]
    boxes = [
        (box[0].stop - box[0].start, box[1].stop - box[1].start)
        for box in ndimage.find_objects(labels)
    ]
    height, width = np.array(boxes, int).reshape(-1, 2).T
    is_kept = (np.bincount(labels.ravel())[1:] >= 3) & (height >= 2)
    is_kept &= (width < 0.9 * gray.shape[1]) & (height < 0.9 * gray.shape[0])
    return height[is_kept]


def find_threshold(gray: np.ndarray) -> int:
    """Return the level up to which pixels are dark: that of the largest variance between classes.

    NOTE: of levels that part a picture equally well, which is so of no photograph, OpenCV's
    rounding chooses one, and this another.
    """
    counts, least = np.bincount(gray.ravel(), minlength=256), float(np.finfo(np.float32).eps)
    scale = 1.0 / gray.size
    mean = float(counts @ np.arange(256)) * scale
    largest, found, dark, dark_mean = 0.0, 0, 0.0, 0.0
    for level, share in enumerate((counts * scale).tolist()):
        dark_mean *= dark
        dark += share
        light = 1.0 - dark
        if min(dark, light) < least or max(dark, light) > 1.0 - least:
            continue
        dark_mean = (dark_mean + level * share) / dark
        light_mean = (mean - dark * dark_mean) / light
        variance = dark * light * (dark_mean - light_mean) ** 2
        if variance > largest:
            largest, found = variance, level
    return found


def _crop_cell(image: Image.Image, grid: Sequence[int], place: tuple[int, int]) -> Image.Image:
    """Return what is of a picture in a slice's row and column, of pixels that are not scaled."""
    (top, bottom), (left, right) = (
        [round(side * (number + more) / count) for more in (0, 1)]
        for side, number, count in zip((image.height, image.width), place, grid, strict=True)
    )
    return image.crop((left, top, right, bottom))
