"""GOT-OCR 2's encoder inputs: every tile of a picture is a unit."""

from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs
from mmjax.rounding import cdiv


class GotOcr2HostInputs(UnitHostInputs):
    """Squares of the tower's size; two convolutions halve rows and columns of patches twice."""

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        if hf_config.model_type != "got_ocr2":
            raise CheckpointError(
                f"`model_type` is `{hf_config.model_type}`, whose prompts say themselves how many "
                "embeddings a picture has; mmjax serves `got_ocr2`, such as "
                "stepfun-ai/GOT-OCR-2.0-hf"
            )
        vision = hf_config.vision_config
        side, patch = vision.image_size, vision.patch_size
        if not (isinstance(side, int) and isinstance(patch, int)) or side % patch:
            raise CheckpointError(
                f"`image_size` and `patch_size` of config.json's vision_config are {side} and "
                f"{patch}; give one number each, of which the second divides the first"
            )
        rows = cdiv(cdiv(side // patch, 2), 2)
        return (vision.num_channels, side, side), rows**2
