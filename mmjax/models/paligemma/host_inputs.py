"""PaliGemma's encoder inputs: a picture is a unit of one size."""

from typing import Any

from mmjax.models.host_inputs import UnitHostInputs


class PaliGemmaHostInputs(UnitHostInputs):
    """Units of one size, with an embedding for each patch."""

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        vision = hf_config.vision_config
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        return shape, (vision.image_size // vision.patch_size) ** 2
