"""Chameleon's encoder inputs: every picture is one unit, with a token for each code of its."""

from typing import Any

from mmjax.models.host_inputs import UnitHostInputs


class ChameleonHostInputs(UnitHostInputs):
    """Units of one size, with as many codes of the VQ-VAE each."""

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        vq_config = hf_config.vq_config
        side = vq_config.resolution // 2 ** (len(vq_config.channel_multiplier) - 1)
        return (vq_config.in_channels, *[vq_config.resolution] * 2), side * side
