"""Images -> a view of the whole and tiles, by HF's DeepSeek-OCR 2 image processor for Pillow."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import RequestValueError, check_settings
from mmjax.models.deepseek_ocr2.host_inputs import MAX_TILES, Sides
from mmjax.processing.image_processors.tiling import check_limits
from mmjax.processing.items.items import ImageSize

_LIMITS = {"min_patches": 2, "max_patches": MAX_TILES}
"""Of a call that says nothing: HF's `DeepseekOcr2Processor.images_kwargs`."""


class ViewAndTiles:
    """HF's image processor, held to the sizes that the model was trained with."""

    valid_kwargs: ClassVar = frozenset({"min_patches", "max_patches"})

    def __init__(self, hf: Any, sides: Sides) -> None:
        """`hf`: a `DeepseekOcr2ImageProcessorPil` whose pixels stay bytes."""
        self.hf, self.sides = hf, sides
        size = {"height": sides.view, "width": sides.view}
        wanted = {"size": size, "tile_size": sides.tile, "crop_to_patches": True}
        found = {
            "size": {"height": hf.size.height, "width": hf.size.width},
            "tile_size": hf.tile_size,
            "crop_to_patches": hf.crop_to_patches,
        }
        check_settings(found, wanted, where="the image processor", source="the model takes")

    def __call__(
        self, images: Sequence[Any], *, return_tensors: str = "np", **kwargs: Any
    ) -> dict[str, Any]:
        """Return the view of each image and the tiles of all.

        Returns:
            `pixel_values` uint8[images, 3, S, S], `pixel_values_local` uint8[tiles, 3, Z, Z],
            `num_local_patches` int64[images] and `image_affine`.
        """
        fewest, most = self.get_limits(kwargs)
        for image in images:
            self._check_size(ImageSize(*image.size))
        outputs = self.hf(list(images), min_patches=fewest, max_patches=most)
        tiles = outputs.get("pixel_values_local")
        none = np.empty((0, 3, self.sides.tile, self.sides.tile), np.uint8)
        return {
            "pixel_values": np.stack(outputs["pixel_values"]),
            "pixel_values_local": none if tiles is None else np.stack(tiles),
            "num_local_patches": np.asarray(outputs["num_local_patches"], np.int64),
            "image_affine": outputs["image_affine"],
        }

    def get_limits(self, kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the fewest and the most tiles that an image is cut into.

        What preprocessor_config.json says of them has no effect in HF either.
        """
        names = ("min_patches", "max_patches")
        fewest, most = (
            _LIMITS[name] if kwargs.get(name) is None else kwargs[name] for name in names
        )
        return check_limits(fewest, most, names, MAX_TILES)

    def _check_size(self, size: ImageSize) -> None:
        if round(min(size) / max(size) * self.sides.view) < 1:
            raise RequestValueError(
                f"image is {size.width}x{size.height} pixels; scaled until its longer side is "
                f"{self.sides.view}, the shorter has none: crop it",
                param="multi_modal_data",
            )
