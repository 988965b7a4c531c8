"""Fuyu's encoder inputs: rows of patches, as many as a picture has."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.models.host_inputs import HostInputs, PackedEncoderSpec, byte_pixels


class FuyuHostInputs(HostInputs):
    """One embedding for each patch; the newlines between their rows are text."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        width = hf_config.patch_size**2 * hf_config.num_channels
        self.encoder_spec = PackedEncoderSpec(
            inputs=byte_pixels("image_patches", (width,), colours_last=True), patches_per_token=1
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the picture's patches, `[patches, rows * columns * channels of pixels]`."""
        return {"image_patches": item["image_patches"]}
