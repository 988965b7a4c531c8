"""Ultravox's host inputs: a clip's spectrogram in chunks of 30 seconds, each a unit."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import EncoderSpec, HostInputs
from mmjax.rounding import cdiv

_FRAMES_PER_STATE = 2
_SWIGLU = "swiglu"


@dataclass(frozen=True, slots=True, kw_only=True)
class UltravoxConfig:
    """The keys of config.json beside those of encoder and decoder, and what is meant without."""

    stack_factor: int = 8
    """States of the encoder that become one embedding."""
    hidden_size: int = 4096
    """Of the first layer's output."""
    projector_act: str = _SWIGLU
    projector_ln_mid: bool = False
    """Whether a norm stands before the second layer, as since version 0.5, or behind it."""
    audio_latency_block_size: int | None = None
    num_projector_layers: int = 0
    """Of attention, in projectors that vLLM has and the published code has not."""

    @classmethod
    def from_hf(cls, hf_config: Any) -> "UltravoxConfig":
        """Read config.json; `CheckpointError` for what is not served."""
        encoder = getattr(getattr(hf_config, "audio_config", None), "model_type", None)
        if encoder != "whisper":
            raise CheckpointError(
                f"`audio_config.model_type` of config.json is {encoder!r}; an Ultravox is served "
                "with the encoder of a `whisper`"
            )
        config = read_config(cls, hf_config, *(one.name for one in fields(cls)))
        if not isinstance(config.stack_factor, int) or config.stack_factor < 1:
            raise CheckpointError(
                f"`stack_factor` of config.json is {config.stack_factor!r}; expected 1 or more"
            )
        if config.audio_latency_block_size is not None:
            raise CheckpointError(
                f"`audio_latency_block_size` is {config.audio_latency_block_size}; an Ultravox is "
                "served whose encoder hears all of a chunk (null)"
            )
        if config.num_projector_layers:
            raise CheckpointError(
                f"`num_projector_layers` is {config.num_projector_layers}; an Ultravox is served "
                "whose projector is two linear layers (0)"
            )
        if config.is_gated and config.hidden_size % 2:
            raise CheckpointError(
                f"`hidden_size` is {config.hidden_size}, of which the `projector_act` {_SWIGLU} "
                "takes halves; expected an even number"
            )
        return config

    @property
    def is_gated(self) -> bool:
        """Whether the second half of the first layer's output gates the first one."""
        return self.projector_act == _SWIGLU


class UltravoxHostInputs(HostInputs):
    """A clip's `input_features` float32[units, C, frames], and its frames, as `num_frames`."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        self.stack_factor = UltravoxConfig.from_hf(hf_config).stack_factor
        audio = hf_config.audio_config
        self.chunk_frames = audio.max_source_positions * _FRAMES_PER_STATE
        self._chunk_rows = cdiv(audio.max_source_positions, self.stack_factor)
        self.encoder_spec = EncoderSpec(
            inputs={
                "input_features": ((audio.num_mel_bins, self.chunk_frames), "float32"),
                "num_keys": ((), "int32"),
                "num_frames": ((), "int32"),
            },
            tokens_per_unit=self._chunk_rows,
        )

    def count_chunk_rows(self, num_frames: int) -> list[int]:
        """Return how many embeddings each chunk of a clip of so many frames has."""
        per_row = _FRAMES_PER_STATE * self.stack_factor
        return [cdiv(frames, per_row) for frames in self._cut(num_frames)]

    def _cut(self, num_frames: int) -> list[int]:
        starts = range(0, num_frames, self.chunk_frames)
        return [min(num_frames - start, self.chunk_frames) for start in starts]

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the chunks, how many states of each are keys, and how many frames it has.

        A clip of one chunk ends where its sound does. The last chunk of a longer one has zeros
        behind it, of which states are computed that no state sees.
        """
        cut = self._cut(int(item["num_frames"]))
        widths = cut if len(cut) == 1 else [self.chunk_frames] * len(cut)
        return {
            "input_features": item["input_features"],
            "num_keys": np.array([cdiv(frames, _FRAMES_PER_STATE) for frames in cut], np.int32),
            "num_frames": np.array(widths, np.int32),
        }

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the rows of each chunk that its sound reaches."""
        counts = self.count_chunk_rows(int(item["num_frames"]))
        rows = [unit * self._chunk_rows + np.arange(count) for unit, count in enumerate(counts)]
        return np.concatenate(rows).astype(np.int32)
