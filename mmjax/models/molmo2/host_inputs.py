"""Molmo 2's encoder inputs: crops in a pack, and which patches, of any crop, become one embedding.

A window of patches may reach over the seam of two crops, so that an item is encoded as a whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import HostInputs, PackedEncoderSpec, byte_pixels
from mmjax.rounding import cdiv

MAX_POOLED = 9
"""Patches of a window, at most: the published ones have 2 x 2 in images, 3 x 3 in videos."""
MARKS = ("<low_res_im_start>", "<im_start>", "<im_col>", "<im_end>", "<frame_start>", "<frame_end>")
"""The n-th is the learned embedding -1 - n of `embed_rows`: items are seen with their marks."""
LOW_START, START, COLUMN, END, FRAME_START, FRAME_END = (-1 - n for n in range(len(MARKS)))
NO_PATCH = -1
_PACK_BLOCK = 256
"""In a pack items start at multiples of this (`plan_calls`), or of a smaller power of two."""


def read_prompt_ids(hf_config: Any) -> Sequence[int]:
    """Return the ids of `<im_patch>` and of `MARKS`, by config.json."""
    patch = hf_config.image_patch_id
    # NOTE: HF's config has no name for it; published files do, and it follows the patch.
    column = getattr(hf_config, "image_col_id", None) or patch + 1
    low, start = hf_config.low_res_image_start_token_id, hf_config.image_start_token_id
    frame = hf_config.frame_start_token_id, hf_config.frame_end_token_id
    return patch, low, start, column, hf_config.image_end_token_id, *frame


class CropShape(NamedTuple):
    """How a crop lies in a pack: an odd number of blocks, or a power of two that fills none."""

    side: int
    """Patches along a side."""
    rows: int
    """Rows of the pack; those behind the patches are padding."""
    rows_per_output: int
    """So many rows give an output; a crop then starts where `plan_calls` lets an item start."""

    @classmethod
    def of(cls, hf_config: Any) -> "CropShape":
        """Read `vision_config`; CheckpointError where its crops are no squares of patches."""
        vision = hf_config.vision_config
        height, width = vision.image_size
        side = height // vision.patch_size
        if height != width or height % vision.patch_size or vision.num_channels != 3:
            raise CheckpointError(
                f"`vision_config` has images of {height} x {width} pixels of "
                f"{vision.num_channels} channels in patches of {vision.patch_size}; mmjax takes "
                "squares of whole patches, of three colours"
            )
        if vision.num_position_embeddings != side**2:
            raise CheckpointError(
                f"`num_position_embeddings` is {vision.num_position_embeddings}; a crop has "
                f"{side**2} patches"
            )
        if side**2 <= _PACK_BLOCK:
            return cls(side, 1 << (side**2 - 1).bit_length(), 1)
        blocks = cdiv(side**2, _PACK_BLOCK) | 1
        return cls(side, blocks * _PACK_BLOCK, blocks)


class Molmo2HostInputs(HostInputs):
    """A crop's patches behind each other, and the windows of an item in the order of its tokens.

    A frame of a video is a crop.
    """

    cut_modalities = frozenset({"video"})
    num_extra_rows = len(MARKS)

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.crop = CropShape.of(hf_config)
        width = 3 * hf_config.vision_config.patch_size**2
        self.encoder_spec = PackedEncoderSpec(
            inputs={
                **byte_pixels("pixel_values", (width,), colours_last=True),
                "pooling": ((cdiv(MAX_POOLED, self.crop.rows_per_output),), "int32"),
            },
            patches_per_token=self.crop.rows_per_output,
            patches_per_crop=self.crop.rows,
            # Fewest embeddings for its rows has a crop of which every window is the largest.
            patches_per_kept=cdiv(self.crop.rows, cdiv(self.crop.side, 3) ** 2),
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of all crops with their padding, and each output's patches.

        `pooling` int32[rows, _]: those of an output's rows, one behind the other, are the rows of
        its patches, counted from the item's first; `NO_PATCH` where it has no more.
        """
        num_patches, num_rows = self.crop.side**2, self.crop.rows
        name = "pixel_values" if "pixel_values" in item else "pixel_values_videos"
        pixels, windows = item[name], item[f"{find_modality(item)}_token_pooling"]
        rows = windows // num_patches * num_rows + windows % num_patches
        rows = np.where(windows < 0, NO_PATCH, rows)
        shape, dtype = self.encoder_spec.inputs["pooling"]
        pooling = np.full((len(pixels) * num_rows, *shape), NO_PATCH, dtype)
        by_output = pooling.reshape(len(pooling) // self.crop.rows_per_output, -1)
        by_output[: len(rows), : rows.shape[1]] = rows
        padded = np.pad(pixels, ((0, 0), (0, num_rows - num_patches), (0, 0)))
        return {"pixel_values": padded.reshape(-1, pixels.shape[-1]), "pooling": pooling}

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the outputs, and the marks around and among them."""
        return item[f"{find_modality(item)}_rows"]


def find_modality(item: Mapping[str, np.ndarray]) -> str:
    """Return what an item is, by its tensors."""
    return "image" if "image_rows" in item else "video"
