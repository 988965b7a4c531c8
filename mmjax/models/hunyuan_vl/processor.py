"""HunyuanOCR's prompt side: a token for each square of patches, each row's end, and two bounds.

Before: `<start> <image> <end>`. After, for 2 rows of 3 squares: `<start> <image>*10 <end>`, all of
which take embeddings: each row has one more, and the picture has one before and one behind them.
They are the tokenizer's `<｜hy_place▁holder▁no▁100｜>`, `102` and `101`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mmjax.models.family import make_factories
from mmjax.models.grid_family import GridInfo
from mmjax.models.hunyuan_vl.host_inputs import HunYuanVLHostInputs
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.image_processors.patches import MAX_ASPECT_RATIO, FlatRowByRow, ImagePatcher
from mmjax.processing.items.parse import ImageSize

_BOS = "<｜hy_begin▁of▁sentence｜>"
_MARK = "<｜hy_place▁holder▁no▁{}｜>"
IMAGE = "".join(_MARK.format(number) for number in (100, 102, 101))
CHAT_TEMPLATE = write_turns(
    start="''",
    content=write_parts(image=IMAGE),
    end=(
        f"{{'system': '{_MARK.format(3)}', 'user': '<｜hy_User｜>', "
        "'assistant': '<｜hy_Assistant｜>'}[message.role]"
    ),
    answer="''",
    first=f"{{{{- '{_BOS}' -}}}}",
)
"""What a turn is stands behind it."""


def count_tokens(rows: Any, columns: Any) -> Any:
    """Return the embeddings of pictures of so many rows and columns of squares."""
    return rows * (columns + 1) + 2


class RowEndPatcher(ImagePatcher):
    """HF's image processor; of two pictures as large, the taller one has more embeddings."""

    def find_largest_frame(self, kwargs: Mapping[str, Any]) -> ImageSize:
        """Return a size, in units, that gives the most embeddings, of those not too long."""
        num_units = self.get_frame_pixels(kwargs) // self.unit**2
        sizes = [
            ImageSize(width=columns, height=min(num_units // columns, MAX_ASPECT_RATIO * columns))
            for columns in range(1, num_units + 1)
            if num_units // columns * MAX_ASPECT_RATIO >= columns
        ]
        return max(sizes, key=lambda size: count_tokens(size.height, size.width))


class HunYuanVLProcessingInfo(GridInfo):
    adds_special_tokens = False
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = {
        "Page to Markdown": (
            "Extract all information from the main body of the document image and represent it in "
            "markdown format, ignoring headers and footers. Tables should be expressed in HTML "
            "format, formulas in the document should be represented using LaTeX format, and the "
            "parsing should be organized according to the reading order."
        ),
        "Text with places": (
            "Detect and recognize text in the image, and output the text coordinates in a "
            "formatted manner."
        ),
        "Formula": "Identify the formula in the image and represent it using LaTeX format.",
        "Table": "Parse the table in the image into HTML.",
    }
    host_inputs = HunYuanVLHostInputs
    image_processors: ClassVar = {"HunYuanVL": "hunyuan_vl"}
    image_patcher = RowEndPatcher
    patch_class = FlatRowByRow
    limits: ClassVar = {"image": None}
    placeholders: ClassVar = {"image": IMAGE}

    def count_embeds(self, modality: str, grids: np.ndarray) -> np.ndarray:
        rows, columns = (grids[:, axis] // self.merge_size for axis in (1, 2))
        return count_tokens(rows, columns)


FACTORIES = make_factories(HunYuanVLProcessingInfo)
