"""What a transcription asks of a model's family: requests to the engine, segments of its answers.

Nothing here waits for anything: whoever has an engine, in this process or in another, asks for the
next request, has it answered, and hands the answer back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import msgspec
import numpy as np

from mmjax.errors import RequestValueError
from mmjax.params.sampling_params import SamplingParams

Task = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptFallback:
    """When a window is transcribed again, at a higher temperature; as HF's `generate` of Whisper.

    RequestError for a threshold that another lacks.
    """

    temperatures: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 1.0)
    """Behind that of the sampling parameters, one after another until no threshold is passed."""
    compression_ratio_threshold: float | None = None
    """Of the bytes of a window's token ids over the same compressed: a text that repeats itself has
    more. None: this is no reason, as of the next two."""
    logprob_threshold: float | None = None
    """Of the mean log-probability of its tokens: an improbable text has less."""
    no_speech_threshold: float | None = None
    """Of the probability that nothing is said: a window with more, and whose text is improbable by
    the threshold before, is left out."""

    def __post_init__(self) -> None:
        if self.no_speech_threshold is not None and self.logprob_threshold is None:
            raise RequestValueError.about(
                "no_speech_threshold",
                "is about windows whose text is improbable, and `logprob_threshold` does not say "
                "which are; give both",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptOptions:
    """What is asked of a clip; RequestError for a task that is none."""

    task: Task = "transcribe"
    language: str | None = None
    """The clip's: a code (`en`) or a name (`english`); None: it is found out."""
    prompt_token_ids: Sequence[int] = ()
    """A text that comes before the transcript, and whose style and words it goes on with."""
    has_timestamps: bool = False
    """Whether segments have times; those of a clip of several windows always do."""
    has_word_times: bool = False
    """Whether tokens have times, too."""
    sampling_params: SamplingParams
    """Of all windows."""
    fallback: TranscriptFallback | None = None
    """None: a window is transcribed once."""
    has_silence: bool = False
    """Whether segments tell how probable silence is, of a model that knows: one request more."""

    def __post_init__(self) -> None:
        if self.task not in get_args(Task):
            raise RequestValueError.about(
                "task", f"is {self.task!r}; expected one of {', '.join(get_args(Task))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptRequest:
    """A request to the engine, of one window."""

    prompt: Mapping[str, Any]
    """As of `LLM.generate`."""
    sampling_params: SamplingParams
    is_text: bool
    """Whether all of its answer's text is the transcript's, as it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a transcript."""

    start: float
    """In seconds of the clip, as `end`."""
    end: float
    token_ids: Sequence[int]
    """As the model gave them, with timestamps."""
    seek: int
    """Frame of the spectrogram at which its window begins."""
    avg_logprob: float | None
    """Of its window's tokens; None: not asked for."""
    temperature: float
    """At which its window was sampled."""
    no_speech_prob: float | None = None
    """How probable it is that nothing is said in its window; None: not known."""
    token_ends: Sequence[float] | None = None
    """When each token ends, in seconds of the clip; None: not asked for."""


class Transcription(Protocol):
    """One clip's."""

    @property
    def language(self) -> str | None:
        """The code of the clip's language; None: not known yet, or the model has but one."""
        ...

    def next_request(self) -> TranscriptRequest | None:
        """Return what is to be asked next; None: the clip is transcribed."""
        ...

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        alignment: np.ndarray | None = None,
    ) -> list[Segment]:
        """Read the answer to that; return the segments that are final by it.

        `logprobs`: of the tokens, or of the prompt's; `alignment`: float32[heads, tokens, states],
        of the prompt's tokens; where the request asked for them. The latter is seconds of work.
        """
        ...


class Transcriber(Protocol):
    """What a family has whose models transcribe."""

    sampling_rate: int
    """Of the clips."""
    before_prompt: str
    """What stands before the text that comes before a transcript."""

    def start(self, samples: Any, options: TranscriptOptions) -> Transcription:
        """Begin with a clip, float32[time], which takes a second for each half an hour of it.

        RequestError names a wrong option.
        """
        ...

    def select_text(self, token_ids: Sequence[int]) -> list[int]:
        """Return those of a segment's tokens that are text."""
        ...


def refuse_options(options: TranscriptOptions) -> None:
    """Raise `RequestError` for what a model cannot do that transcribes all of a clip at once."""
    if options.task == "translate":
        raise RequestValueError(
            "this model's transcripts are in the clip's language; ask for a translation in a "
            "chat about the clip",
            param="model",
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


class WholeTranscriber:
    """What begins transcriptions of all of a clip at once; a family adds `start`."""

    before_prompt = ""

    def __init__(self, tokenizer: Any, sampling_rate: int) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.added_tokens_decoder)
        self.sampling_rate = sampling_rate

    def select_text(self, token_ids: Sequence[int]) -> list[int]:
        """Return all but the special tokens."""
        return [one for one in token_ids if one not in self._special_ids]


class WholeTranscription:
    """The state of a transcription of all of a clip at once, by one request."""

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        samples: np.ndarray,
        sampling_rate: int,
        options: TranscriptOptions,
        language: str | None,
        is_text: bool = True,
    ) -> None:
        """`samples`: float32[T], of the whole clip; `is_text`: as of `TranscriptRequest`."""
        self.language = language
        self._clip = (samples, sampling_rate)
        self._temperature = options.sampling_params.temperature
        self._request: TranscriptRequest | None = TranscriptRequest(
            prompt={"prompt_token_ids": [*prompt], "multi_modal_data": {"audio": [self._clip]}},
            sampling_params=msgspec.structs.replace(
                options.sampling_params, max_tokens=None, prompt_logprobs=None
            ),
            is_text=is_text,
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
        segment = Segment(
            start=0.0,
            end=len(samples) / rate,
            token_ids=token_ids,
            seek=0,
            avg_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
            temperature=self._temperature,
        )
        return [segment]


def name_language(code: str) -> str:
    """Return a language's English name, in small letters; a code that is not known is its own."""
    # On use only: it brings an installed torch along.
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return LANGUAGES.get(code, code)


def find_language_code(language: str) -> str:
    """Return the code of an English name; what is no such name is returned in small letters."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    return TO_LANGUAGE_CODE.get(language.lower(), language.lower())
