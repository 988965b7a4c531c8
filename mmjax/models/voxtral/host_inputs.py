"""Voxtral's host inputs: a clip is cut into spectrograms of 30 seconds, each a unit."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import EncoderSpec, HostInputs

_FRAMES_PER_STATE = 2


class VoxtralHostInputs(HostInputs):
    """A clip's `input_features`: float32[units, C, frames]."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        audio = hf_config.audio_config
        num_states, width, inner = (
            audio.max_source_positions,
            audio.hidden_size,
            audio.intermediate_size,
        )
        if num_states * width % inner:
            raise CheckpointError(
                f"{num_states} states of {width} (`max_source_positions`, `hidden_size` of "
                f"`audio_config`) are no whole number of rows of {inner} (its "
                "`intermediate_size`), of which each becomes an embedding"
            )
        shape = (audio.num_mel_bins, num_states * _FRAMES_PER_STATE)
        self.encoder_spec = EncoderSpec(
            inputs={"input_features": (shape, "float32")},
            tokens_per_unit=num_states * width // inner,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the clip's spectrograms as they are."""
        return {"input_features": item["input_features"]}
