"""Spectrograms cut into windows of whole chunks, as Qwen3-Omni's and Qwen3-ASR's encoder has them.

A chunk of about a second is convolved by itself, to 13 states; those of a window see each other.
"""

from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.rounding import cdiv

_ROWS_PER_CHUNK, _FRAMES_PER_ROW = 13, 8
"""Embeddings of a whole chunk, and frames of one at a chunk's end."""


class ClipWindows:
    """How many embeddings clips have, and their windows, which are units of the encoder."""

    def __init__(self, audio: Any, *, pads_short: bool) -> None:
        """`audio`: HF's `audio_config`; `CheckpointError` for chunks that HF cannot count.

        `pads_short`: whether a clip of less than a chunk has zeros behind it, as longer ones have;
        else the convolutions see its end.
        """
        self.chunk_size: int = 2 * audio.n_window
        self.window_size: int = audio.n_window_infer // self.chunk_size * self.chunk_size
        self._pads_short = pads_short
        if cdiv(self.chunk_size - 1, _FRAMES_PER_ROW) != _ROWS_PER_CHUNK:
            raise CheckpointError(
                f"`audio_config.n_window` is {audio.n_window}; expected 49 to 52: twice as many "
                f"frames are {_ROWS_PER_CHUNK} embeddings, as HF's model counts them"
            )
        if not self.window_size:
            raise CheckpointError(
                f"`audio_config.n_window_infer` is {audio.n_window_infer}; expected "
                f"{self.chunk_size} or more, twice `n_window`"
            )
        self.inputs: dict[str, tuple[tuple[int, ...], str]] = {
            "input_features": ((audio.num_mel_bins, self.window_size), "float32"),
            "num_frames": ((), "int32"),
            "num_seen": ((), "int32"),
        }
        """Of the encoder: shape of a window, dtype."""

    @property
    def num_rows(self) -> int:
        """Embeddings of a window."""
        return self.count_rows(self.window_size)

    def count_rows(self, num_frames: int) -> int:
        """Return how many embeddings a clip has."""
        whole, rest = divmod(num_frames, self.chunk_size)
        return whole * _ROWS_PER_CHUNK + cdiv(rest, _FRAMES_PER_ROW)

    def count_frames(self, num_rows: int) -> int:
        """Return how many frames a clip of so many embeddings has, at least."""
        whole, rest = divmod(num_rows, _ROWS_PER_CHUNK)
        return whole * self.chunk_size + rest * _FRAMES_PER_ROW

    def cut(self, features: np.ndarray) -> dict[str, np.ndarray]:
        """Return the windows of a spectrogram, `[frames, bins]`; the last has zeros behind it."""
        windows, num_frames = cut_frames(features, self.window_size)
        seen = self.chunk_size if self._pads_short else min(len(features), self.chunk_size)
        return {
            "input_features": windows.transpose(0, 2, 1),
            "num_frames": num_frames,
            "num_seen": np.full(len(windows), seen),
        }


def cut_frames(frames: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the chunks of a spectrogram, `[frames, bins]`, and how many frames of it each has.

    `[chunks, size, bins]`, the last with zeros behind it, and int[chunks].
    """
    padded = np.pad(frames, ((0, -len(frames) % size), (0, 0)))
    chunks = padded.reshape(-1, size, frames.shape[1])
    return chunks, np.minimum(len(frames) - size * np.arange(len(chunks)), size)
