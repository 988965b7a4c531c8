"""Gemma 3's encoder inputs: every picture and every pan-and-scan crop is a unit."""

import math
from typing import Any

from mmjax.models.host_inputs import UnitHostInputs


class Gemma3HostInputs(UnitHostInputs):
    """Units of one size, with as many soft tokens each."""

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        shape, _ = UnitHostInputs.read_unit(hf_config)
        return shape, math.isqrt(hf_config.mm_tokens_per_image) ** 2
