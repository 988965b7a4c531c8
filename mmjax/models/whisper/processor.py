"""Whisper's processor: the encoder's prompt is a clip's 1,500 states, the decoder's the request's.

The decoder's prompt is `<|startoftranscript|><|en|><|transcribe|><|notimestamps|>`, say, as text or
as token ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from transformers import BatchFeature

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.models.family import (
    FamilyInfo,
    FamilyProcessor,
    Target,
    item_fields,
    make_factories,
)
from mmjax.models.whisper.alignment import read_alignment_heads
from mmjax.models.whisper.host_inputs import WhisperHostInputs
from mmjax.models.whisper.transcripts import WhisperTokens, WhisperTranscriber
from mmjax.processing.image_processors.parts import KnownKwargs
from mmjax.processing.items.items import AudioProcessorItems
from mmjax.processing.items.parse import (
    ModalityDataItems,
    MultiModalDataItems,
    MultiModalDataParser,
)
from mmjax.processing.media.log_mel import LogMel
from mmjax.processing.processor import EncDecMultiModalProcessor
from mmjax.processing.prompt_updates.updates import PromptIndexTargets
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_FEATURES = "input_features"
_PARAM = "multi_modal_data.audio"


class WhisperDataParser(MultiModalDataParser):
    """Takes samples, and a spectrogram or a window of one as `{"input_features": ...}`."""

    def _parse_audio_data(self, data: Any) -> ModalityDataItems | None:
        if not isinstance(data, Mapping):
            return super()._parse_audio_data(data)
        features = data.get(_FEATURES)
        if data.keys() != {_FEATURES} or not isinstance(features, np.ndarray):
            raise RequestTypeError(
                f"{_PARAM} is a dict of {sorted(map(str, data))}; it must have `{_FEATURES}` "
                "alone, a numpy array of float32",
                param=_PARAM,
            )
        return AudioProcessorItems([dict(data)])


@dataclass(frozen=True, kw_only=True)
class WhisperFeatures:
    """Makes spectrograms; called as HF's processor is."""

    log_mel: LogMel
    known_kwargs: ClassVar[KnownKwargs] = {}
    """None: what is made of a clip depends on it alone."""

    def __call__(
        self, text: str, audio: Sequence[Any] = (), *, return_tensors: str = "np"
    ) -> BatchFeature:
        """Return `input_features`, float32[clips, C, frames]; silence is behind a shorter clip."""
        return BatchFeature({_FEATURES: np.stack([self._extract(clip) for clip in audio])})

    def _extract(self, clip: Any) -> np.ndarray:
        if isinstance(clip, Mapping):
            return self._pad(clip[_FEATURES])
        if len(clip) > self.log_mel.num_samples:
            seconds = len(clip) / self.log_mel.sampling_rate
            raise RequestValueError(
                f"the clip lasts {seconds:.1f} s, and the model hears {self.log_mel.chunk_length} "
                "s at once; cut it, or send it to /v1/audio/transcriptions, which does so",
                param=_PARAM,
            )
        return self.log_mel(self.log_mel.pad(clip))

    def _pad(self, features: np.ndarray) -> np.ndarray:
        """Return a window with zeros behind it, as HF's `generate` fills the last one."""
        num_bins, num_frames = self.log_mel.feature_size, self.log_mel.num_frames
        if features.dtype != np.float32 or features.ndim != 2 or len(features) != num_bins:
            raise RequestValueError(
                f"`{_FEATURES}` is {features.dtype}{list(features.shape)}; it must be "
                f"float32[{num_bins}, frames]",
                param=_PARAM,
            )
        if not 1 <= features.shape[1] <= num_frames or not np.isfinite(features).all():
            raise RequestValueError(
                f"`{_FEATURES}` must have 1 to {num_frames} frames of finite values, and has "
                f"{features.shape[1]}",
                param=_PARAM,
            )
        return np.pad(features, ((0, 0), (0, num_frames - features.shape[1])))


class WhisperProcessingInfo(FamilyInfo):
    data_parser = WhisperDataParser
    host_inputs = WhisperHostInputs
    limits: ClassVar = {"audio": 1}
    inserts_items = True

    @cached_property
    def transcriber(self) -> WhisperTranscriber:
        config = self.get_hf_config()
        path = self.ctx.model_config.path
        tokens, heads = WhisperTokens.read(path, config), read_alignment_heads(path, config)
        width = config.median_filter_width if heads else None
        return WhisperTranscriber(
            self.log_mel, tokens, config.max_target_positions, filter_width=width
        )

    @property
    def max_encoder_len(self) -> int:
        return self.num_unit_tokens

    def load_hf_processor(self) -> WhisperFeatures:
        return WhisperFeatures(log_mel=self.log_mel)

    def get_embed_token_id(self, modality: str) -> int:
        """Return what stands at a clip's places: any token, for the prompt holds no other."""
        return self.get_hf_config().decoder_start_token_id

    def get_target(self, modality: str) -> Target:
        return PromptIndexTargets.start()

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return item_fields("audio", rows=(_FEATURES,))


class WhisperMultiModalProcessor(
    FamilyProcessor[WhisperProcessingInfo], EncDecMultiModalProcessor[WhisperProcessingInfo]
):
    def create_encoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> list[int]:
        """Return an empty prompt, into which the clip is inserted."""
        if not mm_items.get_count("audio", strict=False):
            raise RequestValueError(
                "the prompt has no audio, and the model answers about a clip alone; send one",
                param="multi_modal_data",
            )
        return []


FACTORIES = make_factories(WhisperProcessingInfo, WhisperMultiModalProcessor)
