"""Chameleon's encoder inputs: every picture is one unit."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.models.host_inputs import EncoderSpec, HostInputs, byte_pixels


def count_codes(vq_config: Any) -> int:
    """Return how many codes the VQ-VAE gives a picture."""
    side = vq_config.resolution // 2 ** (len(vq_config.channel_multiplier) - 1)
    return side * side


class ChameleonHostInputs(HostInputs):
    """Units of one size, with as many codes each."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vq_config = hf_config.vq_config
        shape = (vq_config.in_channels, vq_config.resolution, vq_config.resolution)
        self.encoder_spec = EncoderSpec(
            inputs=byte_pixels("pixel_values", shape), tokens_per_unit=count_codes(vq_config)
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the picture as `[1, C, Y, X]`."""
        return {"pixel_values": item["pixel_values"][None]}
