"""LFM2-VL's encoder inputs: packed patches of the tiles of pictures, and of whole ones."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import (
    HostInputs,
    PackedEncoderSpec,
    byte_pixels,
    find_axis_weights,
    find_square_offsets,
)


class Lfm2VLHostInputs(HostInputs):
    """Patches row by row; a square of `downsample_factor` patches a side is an embedding."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision, factor = hf_config.vision_config, hf_config.downsample_factor
        if not isinstance(factor, int) or factor < 1:
            raise CheckpointError(
                f"`downsample_factor` of config.json is {factor!r}; expected 1 or a larger whole "
                "number"
            )
        size = vision.patch_size
        self.side = round(vision.num_patches**0.5)
        self.encoder_spec = PackedEncoderSpec(
            inputs={
                **byte_pixels("pixel_values", (size, size, vision.num_channels), colours_last=True),
                "tile_ids": ((), "int32"),
                "square_offsets": ((), "int32"),
                "row_weights": ((self.side,), "float32"),
                "column_weights": ((self.side,), "float32"),
            },
            patches_per_token=factor**2,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of all tiles, and what each of them depends on."""
        factor, side = self.hf_config.downsample_factor, self.side
        tiles: list[tuple[int, int]] = item["spatial_shapes"].tolist()
        offsets = [find_square_offsets(y, x, factor) for y, x in tiles]
        row_weights = [np.repeat(find_axis_weights(y, side), x, axis=0) for y, x in tiles]
        column_weights = [np.tile(find_axis_weights(x, side), (y, 1)) for y, x in tiles]
        return {
            "pixel_values": item["pixel_values"],
            "tile_ids": np.repeat(np.arange(len(tiles)), [len(one) for one in offsets]),
            "square_offsets": np.concatenate(offsets),
            "row_weights": np.concatenate(row_weights),
            "column_weights": np.concatenate(column_weights),
        }
