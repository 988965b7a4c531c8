"""Windows that are transcribed again where their text is improbable, or repeats itself."""

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.transcripts import TranscriptFallback, TranscriptOptions


class Verdict(NamedTuple):
    """A window's final answer."""

    token_ids: Sequence[int]
    """With the end, where the model ended it."""
    avg_logprob: float | None
    temperature: float
    is_silent: bool
    """Whether nothing is said in it, whatever the tokens are."""
    silence: float | None
    """How probable that is; None: not known."""


class Attempts:
    """The temperatures at which a window is transcribed, as `generate_with_fallback` of HF."""

    def __init__(self, options: TranscriptOptions, *, vocab_size: int) -> None:
        params, fallback = options.sampling_params, options.fallback
        self._thresholds = fallback or TranscriptFallback()
        self._temperatures = [params.temperature, *(fallback.temperatures if fallback else ())]
        self._params = params
        self._has_silence = options.has_silence
        if self._thresholds.logprob_threshold is not None and params.logprobs is None:
            self._params = msgspec.structs.replace(params, logprobs=0)
        self._num_bytes = int(math.log2(vocab_size) / 8) + 1
        """Of a token."""
        self._begin()

    def _begin(self) -> None:
        self._place = 0
        self._silence: float | None = None
        """How probable it is that nothing is said; None: not known."""
        self._unsettled: tuple[Sequence[int], float | None] | None = None
        """An answer of which it is to be known."""

    @property
    def is_silence_asked(self) -> bool:
        """Whether the next answer is to tell how probable silence is."""
        return self._unsettled is not None

    @property
    def sampling_params(self) -> SamplingParams:
        """Return those of the next attempt."""
        temperature = self._temperatures[self._place]
        return msgspec.structs.replace(self._params, temperature=temperature)

    def judge(self, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> Verdict | None:
        """Read an answer; None: it takes another one."""
        if self._unsettled is not None:
            assert logprobs is not None
            self._silence = math.exp(logprobs[-1])
            (token_ids, average), self._unsettled = self._unsettled, None
            return self._settle(token_ids, average)
        average = sum(logprobs) / len(logprobs) if logprobs else None
        limit = self._thresholds.no_speech_threshold
        is_asked = self._has_silence or (limit is not None and self._is_improbable(average))
        if is_asked and self._silence is None:
            self._unsettled = (token_ids, average)
            return None
        return self._settle(token_ids, average)

    def _is_improbable(self, average: float | None) -> bool:
        least = self._thresholds.logprob_threshold
        return least is not None and average is not None and average < least

    def _settle(self, token_ids: Sequence[int], average: float | None) -> Verdict | None:
        given, is_improbable = self._thresholds, self._is_improbable(average)
        is_silent = (
            is_improbable
            and given.no_speech_threshold is not None
            and self._silence is not None
            and self._silence > given.no_speech_threshold
        )
        most = given.compression_ratio_threshold
        repeats = most is not None and self._find_ratio(token_ids) > most
        is_last = self._place == len(self._temperatures) - 1
        if (is_improbable or repeats) and not is_silent and not is_last:
            self._place += 1
            return None
        temperature = self._temperatures[self._place]
        verdict = Verdict(token_ids, average, temperature, is_silent, self._silence)
        self._begin()
        return verdict

    def _find_ratio(self, token_ids: Sequence[int]) -> float:
        data = b"".join(one.to_bytes(self._num_bytes, "little") for one in token_ids)
        return len(data) / len(zlib.compress(data))
