"""Transcripts, as `apply_transcription_request` of HF's processor asks for them: one request.

The model hears all of a clip at once, and tells no times: its transcript is one segment.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from mmjax.errors import RequestValueError
from mmjax.processing.transcripts import (
    Segment,
    TranscriptOptions,
    TranscriptRequest,
    find_language_code,
)


class VoxtralTranscriber:
    """Begins transcriptions of one checkpoint."""

    def __init__(self, tokenizer: Any, sampling_rate: int) -> None:
        self._tokenizer = tokenizer
        self.sampling_rate = sampling_rate

    def start(self, samples: np.ndarray, options: TranscriptOptions) -> "VoxtralTranscription":
        """Write the prompt; `RequestError` names a wrong option."""
        if options.task == "translate":
            raise RequestValueError(
                "this model's transcripts are in the clip's language; ask for a translation in a "
                "chat about the clip",
                param="model",
            )
        if options.prompt_token_ids:
            raise RequestValueError(
                "this model takes no text before a transcript; leave it out, or ask in a chat "
                "about the clip",
                param="prompt",
            )
        if options.has_word_times:
            raise RequestValueError(
                "this model tells no times of words; ask for `segment`, or serve a Whisper",
                param="timestamp_granularities",
            )
        if options.fallback is not None:
            raise RequestValueError(
                "this model transcribes all of a clip at once, and no window of it again; leave "
                "the thresholds out",
                param="logprob_threshold",
            )
        language = None
        if options.language is not None:
            language = find_language_code(options.language)
            if not re.fullmatch("[a-z]{2}", language):
                raise RequestValueError(
                    f"the language `{options.language[:64]}` is none that is known; give its code "
                    "of two letters, such as `en`",
                    param="language",
                )
        return VoxtralTranscription(
            self._write_prompt(language),
            samples=samples,
            sampling_rate=self.sampling_rate,
            options=options,
            language=language,
        )

    def select_text(self, token_ids: Sequence[int]) -> list[int]:
        """Return all but the special tokens."""
        special = self._tokenizer.added_tokens_decoder
        return [one for one in token_ids if one not in special]

    def _write_prompt(self, language: str | None) -> list[int]:
        named = "" if language is None else f"lang:{language}"
        text = f"[INST][BEGIN_AUDIO][AUDIO][/INST]{named}[TRANSCRIBE]"
        return list(self._tokenizer.encode(text))


class VoxtralTranscription:
    """The state of one clip's transcription."""

    def __init__(
        self,
        prompt: list[int],
        *,
        samples: np.ndarray,
        sampling_rate: int,
        options: TranscriptOptions,
        language: str | None,
    ) -> None:
        """`samples`: float32[T], of the whole clip."""
        self.language = language
        self._clip = (samples, sampling_rate)
        self._temperature = options.sampling_params.temperature
        self._request: TranscriptRequest | None = TranscriptRequest(
            prompt={"prompt_token_ids": prompt, "multi_modal_data": {"audio": [self._clip]}},
            sampling_params=msgspec.structs.replace(options.sampling_params, max_tokens=None),
            is_text=True,
        )

    def next_request(self) -> TranscriptRequest | None:
        """Return the only request, and then None."""
        asked, self._request = self._request, None
        return asked

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        alignment: np.ndarray | None = None,
    ) -> list[Segment]:
        """Return the answer as one segment."""
        samples, rate = self._clip
        average = sum(logprobs) / len(logprobs) if logprobs else None
        end = len(samples) / rate
        segment = Segment(
            start=0.0,
            end=end,
            token_ids=token_ids,
            seek=0,
            avg_logprob=average,
            temperature=self._temperature,
        )
        return [segment]
