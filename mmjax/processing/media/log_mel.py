"""Samples of a clip -> its log-mel spectrogram, as HF's `WhisperFeatureExtractor` makes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError, check_settings

_BLOCK_FRAMES = 3000
"""Frames that are transformed at a time: 10 MB of float64, whatever the clip's length."""
_FLOOR = 1e-10
"""The least power, before its logarithm."""
_RANGE = 8.0
"""How far, in powers of ten, a clip's quietest values may be below its loudest."""
_MAX_FREQUENCY = 8000.0
_LINEAR_HERTZ = 1000.0
"""Slaney's scale is linear up to here, 200/3 Hz a mel, and logarithmic from here."""
_HERTZ_PER_MEL = 200.0 / 3
_LOG_STEP = np.log(6.4) / 27


@dataclass(frozen=True, kw_only=True)
class LogMel:
    """The settings of a checkpoint's feature extractor, and the function that they make."""

    feature_size: int = 80
    """Mel bins."""
    sampling_rate: int = 16_000
    hop_length: int = 160
    """Samples from one frame to the next."""
    chunk_length: int = 30
    """Seconds of a clip that an encoder takes at once."""
    n_fft: int = 400
    """Samples of a frame."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "LogMel":
        """Read `preprocessor_config.json`; `CheckpointError` where it asks for what is not made."""
        wanted = {"padding_value": 0.0, "dither": 0.0}
        check_settings(settings, wanted, where="the feature extractor", source="mmjax makes")
        read = {name: settings[name] for name in cls.__dataclass_fields__ if name in settings}
        for name, value in read.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(
                    f"`{name}` of the feature extractor is {value!r}; it must be an integer, 1 or "
                    "more"
                )
        return cls(**read)

    @property
    def num_samples(self) -> int:
        """Samples of a chunk."""
        return self.chunk_length * self.sampling_rate

    @property
    def num_frames(self) -> int:
        """Frames of a chunk."""
        return self.num_samples // self.hop_length

    @cached_property
    def _filters(self) -> np.ndarray:
        """float64[feature_size, n_fft // 2 + 1]: triangles of equal area, on Slaney's scale."""
        ends = np.linspace(0.0, _to_mel(_MAX_FREQUENCY), self.feature_size + 2)
        ends = _to_hertz(ends)
        bins = np.linspace(0, self.sampling_rate // 2, self.n_fft // 2 + 1)
        low, middle, high = (ends[start : start + self.feature_size, None] for start in range(3))
        rising, falling = (bins - low) / (middle - low), (high - bins) / (high - middle)
        return np.maximum(0, np.minimum(rising, falling)) * (2.0 / (high - low))

    def pad(self, samples: np.ndarray) -> np.ndarray:
        """Return the samples with silence behind them, up to the end of their last chunk."""
        num_chunks = max(-(-len(samples) // self.num_samples), 1)
        return np.pad(samples, (0, num_chunks * self.num_samples - len(samples)))

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Return float32[feature_size, frames], `len(samples) // hop_length` of them.

        `samples`: float[time], at `sampling_rate`, -1..1; nothing is added behind them. Values
        below the loudest by more than 8 powers of ten are raised, so that all samples of a clip
        change them: windows of a clip are cut from its spectrogram, not from its samples.
        """
        num_frames = len(samples) // self.hop_length
        padded = np.pad(samples.astype(np.float32), self.n_fft // 2, mode="reflect")
        # The periodic Hann window.
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.n_fft) / self.n_fft)
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop_length]
        log_mel = np.empty((self.feature_size, num_frames), np.float32)
        for start in range(0, num_frames, _BLOCK_FRAMES):
            block = slice(start, min(start + _BLOCK_FRAMES, num_frames))
            power = np.abs(np.fft.rfft(frames[block] * window)) ** 2
            log_mel[:, block] = np.log10(np.maximum(self._filters @ power.T, _FLOOR))
        np.maximum(log_mel, log_mel.max(initial=-np.inf) - np.float32(_RANGE), out=log_mel)
        return (log_mel + np.float32(4)) / np.float32(4)


def _to_mel(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return hertz / _HERTZ_PER_MEL
    return _LINEAR_HERTZ / _HERTZ_PER_MEL + np.log(hertz / _LINEAR_HERTZ) / _LOG_STEP


def _to_hertz(mels: np.ndarray) -> np.ndarray:
    first = _LINEAR_HERTZ / _HERTZ_PER_MEL
    behind = _LINEAR_HERTZ * np.exp(_LOG_STEP * np.maximum(mels - first, 0))
    return np.where(mels < first, mels * _HERTZ_PER_MEL, behind)
