"""Whisper's encoder inputs: one unit is the spectrogram of 30 seconds, however short the clip."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.models.host_inputs import EncoderSpec, HostInputs

FRAMES_PER_STATE = 2
"""Frames of a spectrogram for each of the encoder's states."""


class WhisperHostInputs(HostInputs):
    """A clip's `input_features`, float32[C, frames]: 80 or 128 mel bins, 3,000 frames."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.max_encoder_len = hf_config.max_source_positions
        self.num_frames = self.max_encoder_len * FRAMES_PER_STATE
        self.encoder_spec = EncoderSpec(
            inputs={"input_features": ((hf_config.num_mel_bins, self.num_frames), "float32")},
            tokens_per_unit=self.max_encoder_len,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the clip's spectrogram as one unit."""
        return {"input_features": item["input_features"][None]}
