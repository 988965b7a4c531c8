"""Qwen2.5-Omni's host inputs: Qwen2.5-VL's grids, and clips in chunks of some seconds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.grid_inputs import WindowGridHostInputs
from mmjax.models.host_inputs import EncoderSpec, PromptItem, RotaryPositions


class Qwen25OmniHostInputs(WindowGridHostInputs):
    """Patches window by window, and a clip's spectrogram chunk by chunk."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.tokens_per_second = hf_config.position_id_per_seconds
        audio = hf_config.audio_config
        if audio.n_window % 2:
            raise CheckpointError(
                f"`audio_config.n_window` is {audio.n_window}; expected an even number: of a "
                "chunk's states, two are an embedding"
            )
        self.chunk_size: int = 2 * audio.n_window
        """Frames of a chunk."""
        self.clip_spec = EncoderSpec(
            inputs={
                "input_features": ((audio.num_mel_bins, self.chunk_size), "float32"),
                "num_frames": ((), "int32"),
            },
            tokens_per_unit=audio.n_window // 2,
        )

    @staticmethod
    def count_rows(num_frames: int) -> int:
        """Return how many embeddings a clip has; none where it is too short."""
        return ((num_frames - 1) // 2 + 1) // 2

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a clip's chunks, the last one with zeros behind it; or a grid's patches."""
        if "input_features" not in item:
            return super().units(item)
        frames = np.asarray(item["input_features"])  # frames, bins
        num_chunks = -(-len(frames) // self.chunk_size)
        padded = np.zeros((num_chunks * self.chunk_size, frames.shape[1]), np.float32)
        padded[: len(frames)] = frames
        left = len(frames) - self.chunk_size * np.arange(num_chunks)
        chunks = padded.reshape(num_chunks, self.chunk_size, -1).transpose(0, 2, 1)
        return {"input_features": chunks, "num_frames": np.minimum(left, self.chunk_size)}

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of a clip's sound, or those of a grid's cells."""
        if "input_features" not in item:
            return super().embed_rows(item)
        return np.arange(self.count_rows(len(item["input_features"])), dtype=np.int32)

    def rotary_positions(
        self, num_tokens: int, items: Sequence[PromptItem]
    ) -> RotaryPositions | None:
        """Return positions as HF's `get_rope_index`: a clip's are those of text."""
        seen = [item for item in items if any("grid" in name for name in item.tensors)]
        return super().rotary_positions(num_tokens, seen)

    def find_extent(self, cells: np.ndarray) -> int:
        """Return the same, behind a video's time as well."""
        return int(cells.max()) + 1
