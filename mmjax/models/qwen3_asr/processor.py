"""Qwen3-ASR's prompt side: each `<|audio_pad|>` becomes one for 80 ms of its clip.

Transcripts, as `apply_transcription_request` of HF's processor asks for them: one request, whose
answer is `language English<asr_text>...`; where a language is asked for, that is its beginning.

The model hears all of a clip at once, and tells no times: its transcript is one segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import RequestValueError, check_settings
from mmjax.models.family import WindowedClipsInfo, item_fields, make_factories
from mmjax.models.qwen3_asr.host_inputs import Qwen3ASRHostInputs
from mmjax.processing.chat_turns import write_chatml, write_parts
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.items.parse import AudioEmbedsDataParser
from mmjax.processing.media.log_mel import LogMel
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.transcripts import (
    Segment,
    TranscriptOptions,
    WholeTranscriber,
    WholeTranscription,
    refuse_options,
)

AUDIO = "<|audio_pad|>"
PLACEHOLDER = f"<|audio_start|>{AUDIO}<|audio_end|>"
NO_SYSTEM = (
    "{%- if messages[0].role != 'system' -%}"
    r"{{- '<|im_start|>system\n<|im_end|>\n' -}}"
    "{%- endif -%}"
)
"""What conversations begin with where nobody says more."""
_TEXT = "<asr_text>"
"""Behind the language of an answer."""


class Qwen3ASRTranscriber(WholeTranscriber):
    """Begins transcriptions of one checkpoint."""

    def start(self, samples: np.ndarray, options: TranscriptOptions) -> WholeTranscription:
        """Write the prompt; `RequestError` names a wrong option."""
        refuse_options(options)
        code = None if options.language is None else _find_code(options.language)
        encode = self._tokenizer.encode
        turns = f"<|im_end|>\n<|im_start|>user\n{PLACEHOLDER}<|im_end|>\n<|im_start|>assistant\n"
        asked = "" if code is None else f"language {_list_languages()[code]}{_TEXT}"
        prompt = [
            *encode("<|im_start|>system\n"),
            *options.prompt_token_ids,
            *encode(turns + asked),
        ]
        return Qwen3ASRTranscription(
            prompt,
            samples=samples,
            sampling_rate=self.sampling_rate,
            options=options,
            language=code,
            tokenizer=self._tokenizer,
        )


class Qwen3ASRTranscription(WholeTranscription):
    """The same; an answer may begin with its language."""

    def __init__(
        self, prompt: Sequence[int], *, language: str | None, tokenizer: Any, **settings: Any
    ) -> None:
        """`language`: a code, that was asked for."""
        # What comes before the text is known at the end alone: nothing else is shown before.
        super().__init__(prompt, language=language, is_text=language is not None, **settings)
        self._tokenizer = tokenizer

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        alignment: np.ndarray | None = None,
    ) -> list[Segment]:
        """Return the text of the answer as one segment; without the mark all of it is text."""
        mark = self._tokenizer.convert_tokens_to_ids(_TEXT)
        if mark in token_ids:
            place = list(token_ids).index(mark)
            said = self._tokenizer.decode(list(token_ids[:place])).strip()
            name = said.removeprefix("language ").strip()
            codes = {known: code for code, known in _list_languages().items()}
            # `None`: nobody speaks.
            self.language = codes.get(name, self.language)
            token_ids = token_ids[place + 1 :]
        return super().take(token_ids, logprobs, alignment)


def _list_languages() -> Mapping[str, str]:
    """Return the model's languages by their codes."""
    # On use only: it brings an installed torch along.
    from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME

    return LANGUAGE_CODE_TO_NAME


def _find_code(language: str) -> str:
    """Return the code of a language, of its code or its name."""
    known, asked = _list_languages(), language.lower()
    for code, name in known.items():
        if asked in (code, name.lower()):
            return code
    raise RequestValueError(
        f"the language `{language[:64]}` is none of the model's; it knows {', '.join(known)}",
        param="language",
    )


@dataclass(frozen=True, kw_only=True)
class Qwen3ASRFeatures:
    """Makes the spectrograms of clips; called as HF's feature extractors are."""

    log_mel: LogMel
    min_length: int
    """Samples; a shorter clip has silence behind it."""
    valid_kwargs: ClassVar[Sequence[str]] = ()

    def __call__(self, clips: Sequence[np.ndarray], *, return_tensors: str) -> dict[str, Any]:
        """Return the frames of all clips, float32[frames, bins], and their numbers."""
        found = [self._hear(clip) for clip in clips]
        return {
            "input_features": np.concatenate(found),
            "num_clip_frames": np.array([len(frames) for frames in found]),
        }

    def _hear(self, clip: np.ndarray) -> np.ndarray:
        silence = max(self.min_length - len(clip), 0)
        least = max(self.log_mel.n_fft // 2 + 1, self.log_mel.hop_length)
        if len(clip) + silence < least:
            raise RequestValueError(
                f"a clip has {len(clip)} samples, of which no embedding is made; send one of "
                f"{least} or more",
                param="multi_modal_data.audio",
            )
        return self.log_mel(np.pad(clip, (0, silence))).T


class Qwen3ASRProcessingInfo(WindowedClipsInfo):
    chat_template = write_chatml(write_parts(audio=PLACEHOLDER), NO_SYSTEM)
    data_parser = AudioEmbedsDataParser
    host_inputs = Qwen3ASRHostInputs
    limits: ClassVar = {"audio": None}
    placeholders: ClassVar = {"audio": PLACEHOLDER}
    embed_token = AUDIO

    @property
    def transcriber(self) -> Qwen3ASRTranscriber:
        return Qwen3ASRTranscriber(self.get_tokenizer(), self.log_mel.sampling_rate)

    @cached_property
    def log_mel(self) -> LogMel:
        made = LogMel.from_settings({"feature_size": 128, **self.load_feature_settings()})
        expected = {"feature_size": self.get_hf_config().audio_config.num_mel_bins}
        source = "`audio_config.num_mel_bins` of config.json is"
        check_settings(made, expected, where="the feature extractor", source=source)
        return made

    def load_hf_processor(self) -> ProcessorOfParts:
        self.check_token(AUDIO, "audio_token_id")
        features = Qwen3ASRFeatures(
            log_mel=self.log_mel,
            min_length=self.load_feature_settings().get("min_length", 8000),
        )
        return ProcessorOfParts(tokenizer=self.get_tokenizer(), feature_extractor=features)

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        counts = outputs.get("num_clip_frames", ())
        return item_fields(
            "audio", units=["input_features"], counts=counts, on_host=["num_clip_frames"]
        )

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> int:
        return self.own_inputs.windows.count_rows(int(tensors["num_clip_frames"]))

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Pad clips to whole chunks, and say of each frame whether it is sound, as HF does."""
        if "num_clip_frames" not in tensors:
            return tensors
        counts = np.reshape(tensors["num_clip_frames"], -1)
        chunk = self.own_inputs.windows.chunk_size
        mask = np.arange(int(counts.max() + -counts.max() % chunk))[None, :] < counts[:, None]
        padded = np.zeros((*mask.shape, self.log_mel.feature_size), np.float32)
        padded[mask] = tensors["input_features"]
        return {
            "input_features": padded.transpose(0, 2, 1),
            "input_features_mask": mask.astype(np.int64),
        }


FACTORIES = make_factories(Qwen3ASRProcessingInfo)
