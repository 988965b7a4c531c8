"""PaddleOCR-VL's host inputs: patches row by row, the learned positions that are theirs, M-RoPE."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.models.host_inputs import (
    byte_pixels,
    find_places,
    find_position_taps,
    find_square_offsets,
)
from mmjax.models.qwen2_vl.host_inputs import Qwen2VLHostInputs, read_grid


class PaddleOCRVLHostInputs(Qwen2VLHostInputs):
    """Patches with their places; every one of a picture sees the others."""

    def read_inputs(self, vision: Any) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the encoder's inputs: the shape and dtype of a patch's row."""
        size = vision.patch_size
        return {
            **byte_pixels("pixel_values", (vision.num_channels, size, size)),
            "places": ((2,), "int32"),
            "position_ids": ((4,), "int32"),
            "position_weights": ((4,), "float32"),
            "square_offsets": ((), "int32"),
        }

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a picture's patches, and what each of them depends on."""
        _, rows, columns = read_grid(item)
        vision, places = self.hf_config.vision_config, find_places(rows, columns, 1)
        side = vision.image_size // vision.patch_size
        return {
            "pixel_values": item["pixel_values"],
            "places": places,
            "square_offsets": find_square_offsets(rows, columns, self.merge_size),
            **find_position_taps(places, (rows, columns), side, kernel="bilinear"),
        }
