"""Gemma 4's host inputs: patches of a picture or a video, square by square, and their places."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.models.host_inputs import HostInputs, PackedEncoderSpec, byte_pixels


class Gemma4HostInputs(HostInputs):
    """Patches with their column and row; a picture's see each other, and a frame's."""

    cut_modalities = frozenset({"video"})

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision = hf_config.vision_config
        self.side: int = vision.pooling_kernel_size
        self.encoder_spec = PackedEncoderSpec(
            inputs={
                **byte_pixels("pixel_values", (vision.patch_size**2 * 3,), colours_last=True),
                "places": ((2,), "int32"),
                "frame_ids": ((), "int32"),
            },
            patches_per_token=self.side**2,
            starts_anywhere=True,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches that are no padding, those of one square behind each other."""
        is_video = "pixel_values_videos" in item
        name = "pixel_values_videos" if is_video else "pixel_values"
        places = np.asarray(item["video_position_ids" if is_video else "image_position_ids"])
        pixels = item[name].reshape(-1, *item[name].shape[-2:])  # frames, patches, values
        places = places.reshape(len(pixels), -1, 2)
        order = self.order_patches(places[0])
        return {
            "pixel_values": pixels[:, order].reshape(-1, pixels.shape[-1]),
            "places": places[:, order].reshape(-1, 2),
            "frame_ids": np.repeat(np.arange(len(pixels)), len(order)),
        }

    def order_patches(self, places: np.ndarray) -> np.ndarray:
        """Return the indices of patches by the row and the column of their squares.

        `places`: int[patches, 2], column and row; negative ones are padding's.
        """
        (chosen,) = np.nonzero(places[:, 0] >= 0)
        columns, rows = places[chosen].T
        return chosen[np.lexsort((columns, rows, columns // self.side, rows // self.side))]


class Gemma4UnifiedHostInputs(Gemma4HostInputs):
    """Squares with their column and row, each of which is one patch, and sees no other."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.side = 1
        num_values = hf_config.vision_config.model_patch_size**2 * 3
        self.encoder_spec = PackedEncoderSpec(
            inputs={
                **byte_pixels("pixel_values", (num_values,), colours_last=True),
                "places": ((2,), "int32"),
            },
            patches_per_token=1,
        )
