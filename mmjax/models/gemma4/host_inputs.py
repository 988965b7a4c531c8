"""Gemma 4's host inputs: patches of pictures and videos, square by square, and frames of clips."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mmjax.models.host_inputs import HostInputs, PackedEncoderSpec, byte_pixels
from mmjax.processing.media.clip_windows import cut_frames
from mmjax.rounding import cdiv

FRAMES_PER_ROW = 4
"""Of a clip's spectrogram, of which the encoder makes an embedding."""


class Gemma4HostInputs(HostInputs):
    """Patches with their column and row; a picture's see each other, and a frame's."""

    cut_modalities = frozenset({"video"})
    frames_per_row: ClassVar[int] = FRAMES_PER_ROW

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision = hf_config.vision_config
        self.side: int = vision.pooling_kernel_size
        self.encoder_spec = PackedEncoderSpec(
            inputs={
                **byte_pixels("pixel_values", (vision.patch_size**2 * 3,), colours_last=True),
                "places": ((2,), "int32"),
                "frame_ids": ((), "int32"),
            },
            patches_per_token=self.side**2,
            starts_anywhere=True,
        )
        if hf_config.audio_config is not None:
            self.clip_spec = PackedEncoderSpec(
                inputs={
                    "input_features": ((self.frames_per_row * self.num_values,), "float32"),
                    "num_frames": ((), "int32"),
                },
                patches_per_token=1,
            )

    @property
    def num_values(self) -> int:
        """How many numbers a frame of a clip has: mel bins, or samples."""
        return self.hf_config.audio_config.subsampling_conv_channels[0]

    def is_causal(self, item: Mapping[str, np.ndarray]) -> bool:
        """Return whether it is a clip."""
        return "input_features" in item or "audio_embeds" in item

    def count_rows(self, num_frames: int) -> int:
        """Return how many embeddings a clip of so many frames has."""
        return cdiv(num_frames, self.frames_per_row)

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches, or the frames, that are no padding.

        The patches of one square are behind each other; frames are a row's.
        """
        if "input_features" in item:
            return self._join_frames(item)
        is_video = "pixel_values_videos" in item
        name = "pixel_values_videos" if is_video else "pixel_values"
        places = np.asarray(item["video_position_ids" if is_video else "image_position_ids"])
        pixels = item[name].reshape(-1, *item[name].shape[-2:])  # frames, patches, values
        places = places.reshape(len(pixels), -1, 2)
        order = self.order_patches(places[0])
        return {
            "pixel_values": pixels[:, order].reshape(-1, pixels.shape[-1]),
            "places": places[:, order].reshape(-1, 2),
            "frame_ids": np.repeat(np.arange(len(pixels)), len(order)),
        }

    def _join_frames(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        _, number = np.asarray(item["num_clip_frames"]).tolist()
        frames = np.asarray(item["input_features"])[:number]
        rows, num_frames = cut_frames(frames, self.frames_per_row)
        return {"input_features": rows.reshape(len(rows), -1), "num_frames": num_frames}

    def order_patches(self, places: np.ndarray) -> np.ndarray:
        """Return the indices of patches by the row and the column of their squares.

        `places`: int[patches, 2], column and row; negative ones are padding's.
        """
        (chosen,) = np.nonzero(places[:, 0] >= 0)
        columns, rows = places[chosen].T
        return chosen[np.lexsort((columns, rows, columns // self.side, rows // self.side))]


class Gemma4UnifiedHostInputs(Gemma4HostInputs):
    """Squares with their column and row, each of which is one patch, and sees no other.

    A clip's samples come as they are: a frame is a row.
    """

    frames_per_row = 1

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.side = 1
        num_values = hf_config.vision_config.model_patch_size**2 * 3
        self.encoder_spec = PackedEncoderSpec(
            inputs={
                **byte_pixels("pixel_values", (num_values,), colours_last=True),
                "places": ((2,), "int32"),
            },
            patches_per_token=1,
        )

    @property
    def num_values(self) -> int:
        """How many samples an embedding is made of."""
        return self.hf_config.audio_config.audio_embed_dim
