"""Qwen2-Audio's host inputs: a clip's spectrogram of 30 seconds, and how much of it is sound."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.models.host_inputs import EncoderSpec, HostInputs

_FRAMES_PER_STATE = 2
_STATES_PER_ROW = 2


class Qwen2AudioHostInputs(HostInputs):
    """A clip is one unit, of which the rows behind its end are cut."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        audio = hf_config.audio_config
        num_states = audio.max_source_positions
        shape = (audio.num_mel_bins, num_states * _FRAMES_PER_STATE)
        self.encoder_spec = EncoderSpec(
            inputs={"input_features": (shape, "float32"), "num_keys": ((), "int32")},
            tokens_per_unit=num_states // _STATES_PER_ROW,
        )

    @staticmethod
    def count_states(num_frames: int) -> int:
        """Return how many of the convolutions' states are of the clip: HF masks the others."""
        return (num_frames - 1) // _FRAMES_PER_STATE + 1

    @classmethod
    def count_rows(cls, num_frames: int) -> int:
        """Return how many embeddings a clip has; none where it is too short."""
        return (cls.count_states(num_frames) - 2) // _STATES_PER_ROW + 1

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the clip's spectrogram as one unit, and how many states its sound gives."""
        num_keys = self.count_states(int(item["num_frames"]))
        return {
            "input_features": item["input_features"][None],
            "num_keys": np.array([num_keys], np.int32),
        }

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of the clip's sound."""
        return np.arange(self.count_rows(int(item["num_frames"])), dtype=np.int32)
