"""Images -> a view of the whole, and square tiles in the arrangement that wastes least.

What the published processor computes, which needs torch; in numpy and Pillow.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.processing.image_processors.affine import make_affine
from mmjax.processing.image_processors.image import to_pixels
from mmjax.processing.items.items import ImageSize

_LEFT_OUT: Mapping[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "normalize": True,
}
"""What a key of processor_config.json means where it is left out."""


def choose_resolution(size: ImageSize, candidates: Sequence[ImageSize]) -> ImageSize:
    """Return the candidate in which an image keeps most pixels; of equals, the one it fills best.

    The first of those that are equal in both.
    """

    def rate(candidate: ImageSize) -> tuple[int, int]:
        scale = min(candidate.width / size.width, candidate.height / size.height)
        scaled = int(size.width * scale) * int(size.height * scale)
        kept = min(scaled, size.width * size.height)
        return kept, kept - candidate.width * candidate.height

    return max(candidates, key=rate)


class DeepseekVLV2ImageProcessor:
    """The image part of the published processor, by processor_config.json's settings."""

    valid_kwargs = frozenset({"cropping"})

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        tile_size: int,
        candidate_resolutions: Sequence[Sequence[int]],
    ) -> None:
        """`candidate_resolutions`: (width, height) of the canvases that are cut into tiles."""
        self.tile_size = tile_size
        self.candidates = [ImageSize(width=w, height=h) for w, h in candidate_resolutions]
        uneven = [
            size for size in self.candidates if size.width % tile_size or size.height % tile_size
        ]
        if uneven or not self.candidates:
            raise CheckpointError(
                f"`candidate_resolutions` is {[list(size) for size in self.candidates]}; sides "
                f"must be multiples of the vision tower's `image_size`, {tile_size}"
            )
        values = {key: settings.get(key, value) for key, value in _LEFT_OUT.items()}
        if not values["normalize"]:
            raise CheckpointError("`normalize` of processor_config.json is false; it must be true")
        mean, std = values["image_mean"], values["image_std"]
        self.affine = make_affine(rescale_factor=1 / 255, mean=mean, std=std)
        self._background = tuple(int(channel * 255) for channel in mean)

    def __call__(
        self, images: Sequence[Image.Image], *, return_tensors: str, cropping: Any = None
    ) -> dict[str, np.ndarray]:
        """Return `pixel_values` uint8[tiles, 3, S, S], `images_spatial_crop` int64[images, 2].

        The latter is how many tiles stand side by side, and one above the other. `cropping` false:
        each image is one tile beside its view.
        """
        arranged = [
            self.arrange(ImageSize(*image.size), {"cropping": cropping}) for image in images
        ]
        tiles = [
            tile
            for image, canvas in zip(images, arranged, strict=True)
            for tile in self._cut(image.convert("RGB"), canvas)
        ]
        counts = [[side // self.tile_size for side in canvas] for canvas in arranged]
        return {
            "pixel_values": np.stack([to_pixels(tile) for tile in tiles]),
            "image_affine": self.affine,
            "images_spatial_crop": np.array(counts, np.int64),
        }

    def has_tiles(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether images are cut into several tiles under an HF call's kwargs."""
        cropping = kwargs.get("cropping")
        if cropping is not None and not isinstance(cropping, bool):
            raise RequestValueError(
                f"`cropping` is {cropping!r}; it must be true or false", param="mm_processor_kwargs"
            )
        return cropping is not False

    def list_canvases(self, kwargs: Mapping[str, Any]) -> Sequence[ImageSize]:
        """Return the sizes in pixels of which an image's tiles may be."""
        side = self.tile_size
        return self.candidates if self.has_tiles(kwargs) else [ImageSize(width=side, height=side)]

    def arrange(self, size: ImageSize, kwargs: Mapping[str, Any]) -> ImageSize:
        """Return the size of the canvas for an image; refuse one of which nothing would be left."""
        canvas = choose_resolution(size, self.list_canvases(kwargs))
        if round(min(size) / max(size) * self.tile_size) < 1:
            raise RequestValueError(
                f"image is {size.width}x{size.height} pixels; scaled until its longer side is "
                f"{self.tile_size}, the shorter has none: crop it",
                param="multi_modal_data",
            )
        return canvas

    def _cut(self, image: Image.Image, canvas: ImageSize) -> list[Image.Image]:
        side = self.tile_size
        padded = self._pad(image, canvas)
        tiles = [
            padded.crop((x, y, x + side, y + side))
            for y in range(0, canvas.height, side)
            for x in range(0, canvas.width, side)
        ]
        return [self._pad(image, ImageSize(width=side, height=side)), *tiles]

    def _pad(self, image: Image.Image, size: ImageSize) -> Image.Image:
        """Scale an image to fit, and put it in the middle of a canvas of the mean's colour."""
        method = Image.Resampling.BICUBIC
        canvas = (size.width, size.height)
        return ImageOps.pad(image, canvas, method=method, color=self._background)
