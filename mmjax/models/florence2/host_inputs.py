"""Florence-2's encoder inputs: one unit is an image, of the one size that the processor gives."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import UnitHostInputs
from mmjax.processing.image_processors.parts import load_image_settings

MAX_ENCODER_LEN = 1024
"""Tokens of the longest encoder prompt: a published model's 577 of a picture, and 447 of text.

Every prompt is computed at this length, so it is not the 4,096 positions that some configs have.
"""


class Florence2HostInputs(UnitHostInputs):
    """An image's pixels; and how long the encoder's prompt around it may be."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        (_, height, width), self.num_image_rows = self.read_unit(hf_config)
        positions = hf_config.get_text_config().max_position_embeddings
        self.max_encoder_len = min(positions, MAX_ENCODER_LEN)
        if self.num_image_rows >= self.max_encoder_len:
            raise CheckpointError(
                f"a picture of {width}x{height} pixels is {self.num_image_rows} tokens, and the "
                f"encoder takes {self.max_encoder_len} (`text_config.max_position_embeddings` is "
                f"{positions}); set a smaller size in the image processor's configuration"
            )

    @staticmethod
    def read_unit(hf_config: Any) -> tuple[tuple[int, int, int], int]:
        height, width = read_image_size(hf_config)
        vision = hf_config.vision_config
        rows, columns = grid_of(vision, height, width)
        if max(rows, columns) > vision.max_position_embeddings:
            raise CheckpointError(
                f"`vision_config.max_position_embeddings` is {vision.max_position_embeddings}, but "
                f"pictures of {width}x{height} pixels make {columns} columns and {rows} rows; set "
                "a smaller size in the image processor's configuration"
            )
        return (vision.in_channels, height, width), rows * columns + 1


def read_image_size(hf_config: Any) -> tuple[int, int]:
    """Return the (height, width) of the processor's pictures, in pixels.

    config.json does not have it (`vision_config.image_size`, if somebody adds it, comes first): it
    is in the image processor's file beside it.
    """
    size = getattr(hf_config.vision_config, "image_size", None)
    if size is not None:
        return (size, size) if isinstance(size, int) else (size[0], size[1])
    path = hf_config.name_or_path
    settings = load_image_settings(Path(path)) if path and Path(path).is_dir() else {}
    found = settings.get("crop_size" if settings.get("do_center_crop") else "size")
    if isinstance(found, int):
        return found, found
    if not isinstance(found, Mapping) or not {"height", "width"} <= found.keys():
        raise CheckpointError(
            "Florence-2 pictures have one size, which is the `size` (`height`, `width`) of the "
            f"image processor's configuration in `{path}`; found {found}"
        )
    return found["height"], found["width"]


def grid_of(vision_config: Any, height: int, width: int) -> tuple[int, int]:
    """Return the rows and columns of the last stage's grid, of pictures in pixels."""
    for size, stride, padding in zip(
        vision_config.patch_size,
        vision_config.patch_stride,
        vision_config.patch_padding,
        strict=True,
    ):
        height, width = ((side + 2 * padding - size) // stride + 1 for side in (height, width))
    return height, width
