"""Log-mel spectrograms against HF's feature extractor: its numpy form, and the one in torch."""

from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from mmjax.errors import CheckpointError
from mmjax.processing.media.log_mel import LogMel


def make_clip(seconds: float, rate: int = 16_000) -> np.ndarray:
    """Return a sweep over noise, loud and quiet in turn."""
    time = np.arange(int(seconds * rate)) / rate
    sweep = np.sin(2 * np.pi * (200 + 300 * time) * time) * np.sin(3 * time) ** 2
    noise = np.random.default_rng(0).normal(size=time.size)
    return (0.5 * sweep + 0.01 * noise).astype(np.float32)


@pytest.mark.parametrize("num_bins", [80, 128])
@pytest.mark.parametrize("seconds", [0.005, 2.3, 30.0])
def test_a_chunk_is_hfs(num_bins: int, seconds: float):
    extractor = WhisperFeatureExtractor(feature_size=num_bins)
    log_mel = LogMel.from_settings(extractor.to_dict())
    samples = make_clip(seconds)
    ours = log_mel(log_mel.pad(samples))
    assert ours.shape == (num_bins, log_mel.num_frames)
    assert ours.dtype == np.float32
    (in_numpy,) = extractor._np_extract_fbank_features(log_mel.pad(samples)[None], "cpu")
    np.testing.assert_allclose(ours, in_numpy, atol=1e-5)
    in_torch = extractor(samples, sampling_rate=16_000, return_tensors="np").input_features[0]
    np.testing.assert_allclose(ours, in_torch, atol=1e-4)  # its sums are in float32


def test_a_clip_longer_than_a_chunk_is_one_spectrogram_as_hfs():
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    samples = make_clip(5.01)
    log_mel = LogMel.from_settings(extractor.to_dict())
    (expected,) = extractor._np_extract_fbank_features(samples[None], "cpu")
    ours = log_mel(samples)
    assert ours.shape == (8, 501)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert log_mel.pad(samples).shape == (6 * 16_000,)


def test_other_settings_are_hfs():
    options: dict[str, Any] = {
        "feature_size": 8,
        "sampling_rate": 16_000,
        "hop_length": 100,
        "n_fft": 256,
    }
    extractor = WhisperFeatureExtractor(**options)
    samples = make_clip(1.5)
    (expected,) = extractor._np_extract_fbank_features(samples[None], "cpu")
    np.testing.assert_allclose(LogMel(**options)(samples), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dither": 0.1}, "`dither` of the feature extractor is 0.1"),
        ({"padding_value": 1.0}, "`padding_value` of the feature extractor is 1.0"),
        ({"hop_length": 0}, "`hop_length` of the feature extractor is 0; it must be an integer"),
        ({"feature_size": "80"}, "`feature_size` of the feature extractor is '80'"),
    ],
)
def test_settings_that_are_not_made_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(CheckpointError, match=message):
        LogMel.from_settings(settings)
