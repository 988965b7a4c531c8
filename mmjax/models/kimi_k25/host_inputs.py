"""Kimi K2.5's encoder inputs: packed patches of pictures, and of clips of a few frames."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.models.grid_inputs import read_grid
from mmjax.models.host_inputs import (
    HostInputs,
    PackedEncoderSpec,
    byte_pixels,
    find_places,
    find_position_taps,
    find_square_offsets,
)
from mmjax.rounding import cdiv


class KimiK25HostInputs(HostInputs):
    """Patches frame by frame, row by row; a square of those of a whole clip is an embedding."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        vision = hf_config.vision_config
        self.merge_size: int = vision.merge_kernel_size[0]
        self.clip_frames: int = vision.pos_emb_time
        """Frames that a video is cut into, the last ones apart."""
        per_square, taps = self.merge_size**2, (self.clip_frames,)
        self.encoder_spec = PackedEncoderSpec(
            inputs={
                **byte_pixels("pixel_values", (3, vision.patch_size, vision.patch_size)),
                "places": ((2,), "int32"),
                "position_ids": ((16,), "int32"),
                "position_weights": ((16,), "float32"),
                "clip_ids": ((), "int32"),
                "frame_numbers": ((), "int32"),
                "frame_offsets": (taps, "int32"),
                "frame_weights": (taps, "float32"),
            },
            patches_per_token=per_square,
            patches_per_kept=per_square * self.clip_frames,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of a picture or a video, and what each of them depends on."""
        num_frames, rows, columns = read_grid(item)
        name = "pixel_values" if "image_grid_thw" in item else "pixel_values_videos"
        places, side = find_places(rows, columns, 1), self.hf_config.vision_config.pos_emb_height
        frame = {
            "places": places,
            **find_position_taps(places, (rows, columns), side, kernel="bicubic"),
        }
        firsts = [*range(0, num_frames, self.clip_frames), num_frames]
        clips = [self._find_clip(size, rows, columns) for size in np.diff(firsts).tolist()]
        sizes = [len(clip["frame_numbers"]) for clip in clips]
        return {
            "pixel_values": item[name],
            **{key: np.tile(each, (num_frames, 1)) for key, each in frame.items()},
            "clip_ids": np.repeat(np.arange(len(clips)), sizes),
            **{key: np.concatenate([clip[key] for clip in clips]) for key in clips[0]},
        }

    def _find_clip(self, num_frames: int, rows: int, columns: int) -> dict[str, np.ndarray]:
        """Return a clip's numbers of frames, and where its patches are pooled from.

        The rows of the first frame stand for the clip: those of the others are left out.
        """
        per_frame = rows * columns
        shape = (num_frames, per_frame, self.clip_frames)
        offsets, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        squares = find_square_offsets(rows, columns, self.merge_size)
        offsets[0, :, :num_frames] = squares[:, None] + np.arange(num_frames) * per_frame
        weights[0, :, :num_frames] = 1 / num_frames
        # A single frame is seen as a picture.
        numbers = np.arange(num_frames) + (num_frames > 1)
        return {
            "frame_numbers": np.repeat(numbers, per_frame),
            "frame_offsets": offsets.reshape(-1, self.clip_frames),
            "frame_weights": weights.reshape(-1, self.clip_frames),
        }

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return the rows of the first frame of each clip; None: of a picture, all."""
        num_frames, rows, columns = read_grid(item)
        if num_frames == 1:
            return None
        per_frame = rows * columns // self.merge_size**2
        firsts = np.arange(cdiv(num_frames, self.clip_frames)) * self.clip_frames * per_frame
        return (firsts[:, None] + np.arange(per_frame)).reshape(-1).astype(np.int32)
