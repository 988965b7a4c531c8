"""Transcripts, as HF's `generate` of Whisper makes them: windows of 30 seconds, one after another.

The next window begins at the last timestamp that ended a segment, so that no word is cut (section
3.8 of arXiv 2212.04356).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.model_source import read_generation_config
from mmjax.models.whisper.alignment import find_ends
from mmjax.models.whisper.attempts import Attempts
from mmjax.models.whisper.host_inputs import FRAMES_PER_STATE
from mmjax.params.sampling_params import AlignmentRange, SamplingParams, TranscriptRules
from mmjax.processing.media.log_mel import LogMel
from mmjax.processing.transcripts import (
    Segment,
    TranscriptOptions,
    TranscriptRequest,
    find_language_code,
)
from mmjax.rounding import cdiv

_LEAST_ALIGNED = 2
"""Tokens of a window that is aligned: the last is not."""


@dataclass(frozen=True, kw_only=True)
class WhisperTokens:
    """The tokens that generation_config.json names, under its names."""

    decoder_start_token_id: int
    eos_token_id: int
    no_timestamps_token_id: int | None
    lang_to_id: Mapping[str, int]
    """`<|en|>` -> its token; empty of a model of one language."""
    language: str | None
    """The code of clips of which nobody says it, as fine-tuned ones name theirs; None: it is found
    out."""
    task_to_id: Mapping[str, int]
    suppress_tokens: Sequence[int]
    begin_suppress_tokens: Sequence[int]
    max_initial_timestamp_index: int | None
    prev_sot_token_id: int | None

    vocab_size: int

    @property
    def no_speech(self) -> int | None:
        """The token that stands for silence, in HF's `generate` the one before."""
        none = self.no_timestamps_token_id
        return None if none is None else none - 1

    @classmethod
    def read(cls, path: Path, hf_config: Any) -> "WhisperTokens":
        """Read a checkpoint's; where it has none of them, those of config.json hold."""
        settings = read_generation_config(path)

        def find(name: str, default: Any = None) -> Any:
            value = settings.get(name)
            return getattr(hf_config, name, default) if value is None else value

        eos = find("eos_token_id")
        suppressed = list(find("suppress_tokens") or ())
        is_multilingual = settings.get("is_multilingual", True)
        if is_multilingual and not (settings.get("lang_to_id") and settings.get("task_to_id")):
            raise CheckpointError(
                "generation_config.json has no `lang_to_id` and `task_to_id`, by which a "
                "transcript's language and task are asked for; take the checkpoint's newer one, "
                "or set `is_multilingual` to false if the model knows one language"
            )
        languages = settings["lang_to_id"] if is_multilingual else {}
        # As transformers has it for files that do not say so.
        previous = suppressed[-2] if len(suppressed) >= 2 else None
        return cls(
            decoder_start_token_id=find("decoder_start_token_id"),
            eos_token_id=eos[0] if isinstance(eos, list) else eos,
            no_timestamps_token_id=settings.get("no_timestamps_token_id"),
            lang_to_id=languages,
            language=_read_language(settings.get("language"), languages),
            task_to_id=settings["task_to_id"] if is_multilingual else {},
            suppress_tokens=suppressed,
            begin_suppress_tokens=list(find("begin_suppress_tokens") or ()),
            max_initial_timestamp_index=settings.get("max_initial_timestamp_index"),
            prev_sot_token_id=settings.get("prev_sot_token_id", previous),
            vocab_size=hf_config.vocab_size,
        )


def _read_language(given: Any, languages: Mapping[str, int]) -> str | None:
    """Return the code of generation_config.json's `language`, a name, a code or its token."""
    if given is None or not languages:
        return None
    code = find_language_code(str(given).strip("<|>"))
    if f"<|{code}|>" not in languages:
        raise CheckpointError(
            f"`language` of generation_config.json is {given!r}; give one of `lang_to_id` there"
        )
    return code


class WhisperTranscriber:
    """Begins transcriptions of one checkpoint."""

    before_prompt = " "

    def __init__(
        self,
        log_mel: LogMel,
        tokens: WhisperTokens,
        max_positions: int,
        *,
        filter_width: int | None,
    ) -> None:
        """`max_positions`: of the decoder; `filter_width`: as of `find_ends`, None: no heads."""
        self.log_mel, self.tokens, self.filter_width = log_mel, tokens, filter_width
        self._max_positions = max_positions
        self.sampling_rate = log_mel.sampling_rate

    def start(self, samples: np.ndarray, options: TranscriptOptions) -> "WhisperTranscription":
        """Make the clip's spectrogram; `RequestError` names a wrong option."""
        tokens = self.tokens
        prompt = self._frame_prompt(options.prompt_token_ids)
        asked = options.language
        language = tokens.language if asked is None else self._find_language(asked)
        if options.task == "translate" and not tokens.task_to_id:
            raise RequestValueError(
                "this model knows English alone, and translates nothing; ask /v1/audio/"
                "transcriptions",
                param="model",
            )
        is_long = len(samples) > self.log_mel.num_samples
        has_timestamps = options.has_timestamps or is_long
        if has_timestamps and tokens.no_timestamps_token_id is None:
            raise RequestValueError(
                "this checkpoint's generation_config.json names no `no_timestamps_token_id`, so "
                f"that it knows no times, nor clips of more than {self.log_mel.chunk_length} s; "
                "send a shorter clip, and ask for text",
                param="response_format",
            )
        thresholds = options.fallback
        if thresholds and thresholds.no_speech_threshold is not None and tokens.no_speech is None:
            raise RequestValueError(
                "this checkpoint's generation_config.json names no `no_timestamps_token_id`, "
                "before which the token of silence is; leave `no_speech_threshold` out",
                param="no_speech_threshold",
            )
        if options.has_word_times and self.filter_width is None:
            raise RequestValueError(
                "this checkpoint's generation_config.json has no `alignment_heads`, by which words "
                "get times; ask for `segment`, or put the file of its publisher's newer version "
                "in its place",
                param="timestamp_granularities",
            )
        num_sounding = cdiv(len(samples), self.log_mel.hop_length)
        samples = samples if is_long else self.log_mel.pad(samples)
        resolved = replace(
            options, prompt_token_ids=prompt, language=language, has_timestamps=has_timestamps
        )
        return WhisperTranscription(self, self.log_mel(samples), resolved, num_sounding)

    def select_text(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens before the end's: those behind it are marks and timestamps."""
        return [one for one in token_ids if one < self.tokens.eos_token_id]

    def _frame_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """Return a text's last tokens behind the mark of what came before."""
        if not token_ids:
            return []
        if self.tokens.prev_sot_token_id is None:
            raise RequestValueError(
                "this checkpoint knows no token before an earlier text (`prev_sot_token_id`); "
                "leave the prompt out",
                param="prompt",
            )
        return [self.tokens.prev_sot_token_id, *token_ids[-(self._max_positions // 2 - 1) :]]

    def _find_language(self, language: str) -> str:
        known = self.tokens.lang_to_id
        if not known:
            raise RequestValueError(
                "this model knows English alone; leave the language out", param="language"
            )
        code = find_language_code(language)
        if f"<|{code}|>" not in known:
            codes = ", ".join(sorted(one.strip("<|>") for one in known))
            raise RequestValueError(
                f"the language `{language[:64]}` is none of the model's; it knows {codes}",
                param="language",
            )
        return code


class WhisperTranscription:
    """The state of one clip's transcription."""

    def __init__(
        self,
        checkpoint: WhisperTranscriber,
        features: np.ndarray,
        options: TranscriptOptions,
        num_sounding: int,
    ) -> None:
        """`features`: float32[C, frames], of the whole clip; so many are no silence behind it.

        Of the options, the prompt is what stands before each window's, the language a code.
        """
        tokens = checkpoint.tokens
        self._log_mel, self._tokens = checkpoint.log_mel, tokens
        self._filter_width = checkpoint.filter_width
        self._num_sounding = min(num_sounding, features.shape[1])
        self._unaligned: _Unaligned | None = None
        """A window whose tokens have no times yet."""
        self.language = options.language if tokens.lang_to_id else "en"
        self._features = features
        self._options = options
        self._prompt = list(options.prompt_token_ids)
        self._is_detecting = options.language is None and bool(tokens.lang_to_id)
        self._seek = 0
        self._attempts = Attempts(options, vocab_size=tokens.vocab_size)
        none = tokens.no_timestamps_token_id
        self._times_from = 2**31 if none is None else none + 1
        """The token of 0.00 s."""

    def next_request(self) -> TranscriptRequest | None:
        """Return the request of the next window, or of one again.

        Or one that finds out the language, or whether anything is said.
        """
        if self._is_detecting:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=1,
                detokenize=False,
                allowed_token_ids=list(self._tokens.lang_to_id.values()),
            )
            return self._ask([self._tokens.decoder_start_token_id], params, is_text=False)
        if self._attempts.is_silence_asked:
            start, silence = self._tokens.decoder_start_token_id, self._tokens.no_speech
            assert silence is not None
            params = SamplingParams(
                temperature=0.0, max_tokens=1, detokenize=False, prompt_logprobs=0
            )
            return self._ask([*self._prompt, start, silence], params, is_text=False)
        if self._unaligned is not None:
            return self._ask_alignment(self._unaligned)
        if self._seek >= self._features.shape[1]:
            return None
        prompt = [*self._prompt, *self._begin()]
        rules = TranscriptRules(
            suppressed_token_ids=self._tokens.suppress_tokens,
            first_suppressed_token_ids=self._tokens.begin_suppress_tokens,
            eos_token_id=self._tokens.eos_token_id,
            timestamps_from=self._times_from if self._options.has_timestamps else None,
            last_first_timestamp=self._find_last_first(),
        )
        params = msgspec.structs.replace(
            self._attempts.sampling_params,
            max_tokens=None,
            prompt_logprobs=None,  # no means of a window
            transcript=rules,
        )
        is_text = not self._options.has_timestamps and self._options.fallback is None
        return self._ask(prompt, params, is_text=is_text)

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        alignment: np.ndarray | None = None,
    ) -> list[Segment]:
        """Read a window's tokens, as HF's `_retrieve_segment`, or what aligns them."""
        if self._unaligned is not None:
            assert alignment is not None, "no alignment came"
            return self._add_times(alignment)
        if self._is_detecting:
            found = next(k for k, v in self._tokens.lang_to_id.items() if v == token_ids[0])
            self.language, self._is_detecting = found.strip("<|>"), False
            return []
        verdict = self._attempts.judge(token_ids, logprobs)
        if verdict is None:
            return []
        num_frames = min(self._features.shape[1] - self._seek, self._log_mel.num_frames)
        if verdict.is_silent:
            self._seek += num_frames
            return []
        token_ids = verdict.token_ids
        is_ended = list(token_ids[-1:]) == [self._tokens.eos_token_id]
        window = _Window(
            list(token_ids[:-1] if is_ended else token_ids),
            times_from=self._times_from,
            start=self._seek * self._seconds_per_frame,
            num_frames=num_frames,
            seconds_per_state=self._seconds_per_frame * FRAMES_PER_STATE,
        )
        parts, reached = window.split()
        segments = [
            Segment(
                start=start,
                end=end,
                token_ids=part,
                seek=self._seek,
                avg_logprob=verdict.avg_logprob,
                temperature=verdict.temperature,
                no_speech_prob=verdict.silence,
            )
            for start, end, part in parts
        ]
        start = self._seek
        # Without progress the same window would be asked for ever.
        self._seek += reached or num_frames
        if not self._options.has_word_times:
            return segments
        self._unaligned = _Unaligned(segments, token_ids, start)
        return self._add_times(None) if len(token_ids) < _LEAST_ALIGNED else []

    def _ask_alignment(self, window: "_Unaligned") -> TranscriptRequest:
        """Have all tokens of a window read at once, but the last: nothing comes behind it."""
        prompt = [*self._prompt, *self._begin()]
        num_states = min(self._num_sounding - window.seek, self._log_mel.num_frames)
        # A last window may be shorter than a state: all of it is then that state.
        wanted = AlignmentRange(
            first_token=len(prompt), num_states=max(num_states // FRAMES_PER_STATE, 1)
        )
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, alignment=wanted)
        tokens = [*prompt, *window.token_ids[:-1]]
        return self._ask(tokens, params, is_text=False, seek=window.seek)

    def _add_times(self, alignment: np.ndarray | None) -> list[Segment]:
        """Return a window's segments with the times of their tokens; None: it has one at most."""
        assert self._unaligned is not None
        assert self._filter_width is not None
        (segments, token_ids, seek), self._unaligned = self._unaligned, None
        ends = np.zeros(len(token_ids))
        if alignment is not None:
            states = find_ends(alignment, width=self._filter_width)
            # The last token ends where the one before does.
            ends = np.append(states, states[-1]) * FRAMES_PER_STATE * self._seconds_per_frame
        ends = (ends + seek * self._seconds_per_frame).tolist()
        timed, first = [], 0
        for segment in segments:
            end = first + len(segment.token_ids)
            timed.append(replace(segment, token_ends=ends[first:end]))
            first = end
        return timed

    @property
    def _seconds_per_frame(self) -> float:
        return self._log_mel.hop_length / self._log_mel.sampling_rate

    def _begin(self) -> list[int]:
        """Return the tokens that a transcript begins with."""
        tokens, start = self._tokens, [self._tokens.decoder_start_token_id]
        if tokens.lang_to_id:
            task = tokens.task_to_id[self._options.task]
            start += [tokens.lang_to_id[f"<|{self.language}|>"], task]
        if not self._options.has_timestamps and tokens.no_timestamps_token_id is not None:
            start.append(tokens.no_timestamps_token_id)
        return start

    def _find_last_first(self) -> int | None:
        most = self._tokens.max_initial_timestamp_index
        return None if most is None or not self._options.has_timestamps else self._times_from + most

    def _ask(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        is_text: bool,
        seek: int | None = None,
    ) -> TranscriptRequest:
        """`seek`: the window's first frame, in place of the next one's."""
        start = self._seek if seek is None else seek
        features = self._features[:, start : start + self._log_mel.num_frames]
        data = {"audio": {"input_features": np.ascontiguousarray(features)}}
        return TranscriptRequest(
            prompt={"prompt_token_ids": prompt, "multi_modal_data": data},
            sampling_params=params,
            is_text=is_text,
        )


class _Unaligned(NamedTuple):
    """A window whose tokens are known, and not when they are said."""

    segments: Sequence[Segment]
    token_ids: Sequence[int]
    """All that were generated, with the end."""
    seek: int
    """The window's first frame."""


class _Window(NamedTuple):
    """A window's tokens, and where it lies."""

    token_ids: list[int]
    times_from: int
    """The token of its first moment."""
    start: float
    """In seconds of the clip."""
    num_frames: int
    seconds_per_state: float

    def split(self) -> tuple[list[tuple[float, float, list[int]]], int]:
        """Return segments (start, end, tokens), and how many frames they reach.

        Two timestamps side by side end a segment and begin the next one. What follows the last pair
        is left to the next window, unless a timestamp ends it: then nothing more is said.
        """
        is_time = [token_id >= self.times_from for token_id in self.token_ids]
        ends = [place + 1 for place, pair in enumerate(pairwise(is_time)) if all(pair)]
        if not ends:
            return [(self.start, self._find_end(is_time), self.token_ids)], self.num_frames
        is_finished = is_time[-2:] == [False, True]
        if is_finished:
            ends.append(len(self.token_ids))
        else:
            # The second of the last pair stays, to tell that more follows.
            ends[-1] += 1
        segments = []
        for first, end in zip([0, *ends], ends, strict=False):
            part = self.token_ids[first:end]
            is_last = end == ends[-1]
            last = part[-2] if is_last and not is_finished else part[-1]
            segments.append((self._find_time(part[0]), self._find_time(last), part))
        if is_finished:
            return segments, self.num_frames
        last_time = self.token_ids[ends[-1] - 2] - self.times_from
        return segments, last_time * FRAMES_PER_STATE

    def _find_end(self, is_time: Sequence[bool]) -> float:
        """Return the end of the only segment: that of the window, or the last timestamp."""
        times = [one for one, is_one in zip(self.token_ids, is_time, strict=True) if is_one]
        if times and times[-1] != self.times_from:
            return self._find_time(times[-1])
        return self.start + self.num_frames // FRAMES_PER_STATE * self.seconds_per_state

    def _find_time(self, token_id: int) -> float:
        return self.start + (token_id - self.times_from) * self.seconds_per_state
