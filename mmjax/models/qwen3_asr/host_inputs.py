"""Qwen3-ASR's host inputs: a clip's windows of some seconds, each a unit."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import EncoderSpec, HostInputs
from mmjax.processing.media.clip_windows import ClipWindows


class Qwen3ASRHostInputs(HostInputs):
    """A clip's `input_features`: float32[frames, bins]."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        if getattr(hf_config, "thinker_config", None):
            raise CheckpointError(
                "config.json has a `thinker_config`: these are the files of Qwen's own code; take "
                "those for transformers, such as `Qwen/Qwen3-ASR-1.7B-hf`"
            )
        self.windows = ClipWindows(hf_config.audio_config, pads_short=True)
        self.encoder_spec = EncoderSpec(
            inputs=self.windows.inputs, tokens_per_unit=self.windows.num_rows
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the clip's windows."""
        return self.windows.cut(np.asarray(item["input_features"]))

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of the clip's sound."""
        return np.arange(self.windows.count_rows(len(item["input_features"])), dtype=np.int32)
