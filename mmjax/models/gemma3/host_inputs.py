"""Gemma 3's encoder inputs: every picture and every pan-and-scan crop is a unit."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.models.host_inputs import EncoderSpec, HostInputs, byte_pixels


class Gemma3HostInputs(HostInputs):
    """Units of one size, with as many soft tokens each."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision = hf_config.vision_config
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        self.encoder_spec = EncoderSpec(
            inputs=byte_pixels("pixel_values", shape),
            tokens_per_unit=math.isqrt(hf_config.mm_tokens_per_image) ** 2,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the picture and its crops as `[units, C, Y, X]`."""
        return {"pixel_values": item["pixel_values"]}
