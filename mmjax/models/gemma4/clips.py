"""Gemma 4's clips -> what its encoder of sounds takes: spectrograms, or samples as they are.

HF cuts a clip of more than 30 s without a word; here it is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.gemma4.host_inputs import FRAMES_PER_ROW

SAMPLING_RATE = 16_000
_PARAM = "multi_modal_data.audio"


@dataclass(frozen=True, kw_only=True)
class Gemma4Features:
    """Makes what the encoder takes of clips; called as HF's feature extractors are."""

    num_samples: int
    """Of a clip, at most."""
    extractor: Any = None
    """HF's, of spectrograms; None: samples are taken as they are."""
    samples_per_frame: int = 0
    """Of samples as they are."""
    valid_kwargs: ClassVar[Sequence[str]] = ()

    @classmethod
    def of_spectrograms(
        cls, settings: Mapping[str, Any], *, max_rows: int, num_mel_bins: int
    ) -> "Gemma4Features":
        """Read a checkpoint's settings; `CheckpointError` where the encoder takes others.

        `max_rows`: embeddings that a clip may have.
        """
        if settings.get("dither"):
            raise CheckpointError(
                f"`dither` of the feature extractor is {settings['dither']}: noise, by which equal "
                "clips would differ; expected 0.0"
            )
        # On use only, as HF's image processors.
        module = import_module("transformers.models.gemma4.feature_extraction_gemma4")
        size = settings.get("feature_size", 128)
        _check("feature_size", size, num_mel_bins, "`subsampling_conv_channels`")
        extractor = module.Gemma4AudioFeatureExtractor(**settings)
        _check("sampling_rate", extractor.sampling_rate, SAMPLING_RATE, "mmjax")
        num_samples = max_rows * FRAMES_PER_ROW * extractor.hop_length
        return cls(num_samples=num_samples, extractor=extractor)

    @classmethod
    def of_samples(
        cls, settings: Mapping[str, Any], *, max_rows: int, samples_per_frame: int
    ) -> "Gemma4Features":
        """Likewise, of an encoder that takes samples."""
        given = settings.get("audio_samples_per_token", samples_per_frame)
        _check("audio_samples_per_token", given, samples_per_frame, "`audio_embed_dim`")
        _check(
            "sampling_rate", settings.get("sampling_rate", SAMPLING_RATE), SAMPLING_RATE, "mmjax"
        )
        return cls(num_samples=max_rows * samples_per_frame, samples_per_frame=samples_per_frame)

    def __call__(self, clips: Sequence[np.ndarray], *, return_tensors: str) -> dict[str, Any]:
        """Return the frames of all clips, float32[frames, values], and their numbers.

        `num_clip_frames` int64[clips, 2]: of a clip's frames, and of those that are all sound.
        """
        found = [self._make_frames(clip) for clip in clips]
        return {
            "input_features": np.concatenate([frames for frames, _ in found]),
            "num_clip_frames": np.array([(len(frames), number) for frames, number in found]),
        }

    def _make_frames(self, clip: np.ndarray) -> tuple[np.ndarray, int]:
        seconds = len(clip) / SAMPLING_RATE
        if len(clip) > self.num_samples:
            raise RequestValueError(
                f"a clip lasts {seconds:.1f} s, and the model hears "
                f"{self.num_samples / SAMPLING_RATE:g} s at once; cut it, and send its parts as "
                "several",
                param=_PARAM,
            )
        if self.extractor is None:
            size = self.samples_per_frame
            frames = np.pad(clip, (0, -len(clip) % size)).reshape(-1, size).astype(np.float32)
            return frames, len(frames)
        # One at a time: how HF pads a clip depends on those beside it, what is sound does not.
        outputs = self.extractor([clip], truncation=False, return_tensors="np")
        number = int(outputs["input_features_mask"][0].sum())
        if not number:
            raise RequestValueError(
                f"a clip has {len(clip)} samples, {seconds:.3f} s, of which no embedding is made; "
                f"send one of more than {self.extractor.hop_length}",
                param=_PARAM,
            )
        return outputs["input_features"][0], number


def as_batch(features: np.ndarray, num_clip_frames: np.ndarray) -> dict[str, np.ndarray]:
    """Return the frames of clips as HF's processor does: a row a clip, padded, and a mask."""
    counts, numbers = num_clip_frames.T
    mask = np.arange(counts.max())[None, :] < numbers[:, None]
    padded = np.zeros((*mask.shape, features.shape[1]), np.float32)
    padded[np.arange(counts.max())[None, :] < counts[:, None]] = features
    return {"input_features": padded, "input_features_mask": mask}


def _check(name: str, given: Any, expected: Any, source: str) -> None:
    if given != expected:
        raise CheckpointError(
            f"`{name}` of the feature extractor is {given}, and {source} takes {expected}; make "
            "them equal"
        )
