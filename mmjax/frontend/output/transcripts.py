"""A transcript in the forms that clients ask for: text, subtitles, and text as it grows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mmjax.frontend.output.outputs import CompletionOutput, Logprob
from mmjax.frontend.output.token_bytes import REPLACEMENT
from mmjax.processing.transcripts import Segment, Transcriber, Transcription, name_language

Decode = Callable[[Sequence[int]], str]
_NUM_DECODED = 64
"""Tokens before a new one with which it is decoded, at least."""


class Word(NamedTuple):
    """A word of a transcript."""

    text: str
    start: float
    """In seconds of the clip, as `end`."""
    end: float


@dataclass(kw_only=True)
class Transcript:
    """What is known of a clip's transcript."""

    transcriber: Transcriber
    decode: Decode
    duration: float
    """In seconds."""
    language: str | None = None
    """A code as `en`; None: not known yet, or the model does not say."""
    segments: list[Segment] = field(default_factory=list)
    tokenizer: Any = None
    """Of the words."""

    @classmethod
    def of(cls, transcriber: Transcriber, tokenizer: Any, samples: np.ndarray) -> "Transcript":
        """Return an empty one; `samples`: float32[time], of the clip."""
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        duration = len(samples) / transcriber.sampling_rate
        return cls(transcriber=transcriber, decode=decode, duration=duration, tokenizer=tokenizer)

    def add(
        self,
        transcription: Transcription,
        item: CompletionOutput,
        prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None,
        alignment: np.ndarray | None = None,
    ) -> list[Segment]:
        """Take in the answer to a transcription's request; return the segments that it ends."""
        found = [one for one in prompt_logprobs or item.logprobs or () if one]
        logprobs = [next(iter(one.values())).logprob for one in found] or None
        segments = transcription.take(item.token_ids, logprobs, alignment)
        self.segments += segments
        self.language = transcription.language
        return segments

    @property
    def text(self) -> str:
        """All of it, in one line."""
        return self._decode([one for segment in self.segments for one in segment.token_ids]).strip()

    def find_words(self) -> list[Word]:
        """Return the words with their times; none where tokens have no times.

        As HF's `_decode_asr`: a token lasts from the end of the one before.
        """
        # On use only: it brings an installed torch along.
        from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

        language = None if self.language is None else name_language(self.language)
        words: list[Word] = []
        last = 0.0
        for segment in self.segments:
            ends = segment.token_ends or ()
            starts = [last, *ends][: len(ends)]
            last = ends[-1] if ends else last
            spoken = [
                (token_id, start, end)
                for token_id, start, end in zip(segment.token_ids, starts, ends, strict=False)
                if self.transcriber.select_text([token_id])
            ]
            if not spoken:
                continue
            found = _combine_tokens_into_words(
                self.tokenizer, [token_id for token_id, _, _ in spoken], language
            )
            words += [
                Word(text.strip(), self.cut(spoken[places[0]][1]), self.cut(spoken[places[-1]][2]))
                for text, _, places in zip(*found, strict=True)
            ]
        return words

    def to_srt(self) -> str:
        """Return it as SubRip's subtitles."""
        blocks = [
            f"{number}\n{self._write_times(segment, ',')}\n{self._write_line(segment)}\n"
            for number, segment in enumerate(self.segments, 1)
        ]
        return "\n".join(blocks)

    def to_vtt(self) -> str:
        """Return it as WebVTT."""
        blocks = [
            f"{self._write_times(segment, '.')}\n{self._write_line(segment)}\n"
            for segment in self.segments
        ]
        return "\n".join(["WEBVTT\n", *blocks])

    def cut(self, seconds: float) -> float:
        """Return a time within the clip: a short one is heard with silence behind it."""
        return round(min(seconds, self.duration), 3)

    def _write_times(self, segment: Segment, point: str) -> str:
        start, end = (_write_time(self.cut(one), point) for one in (segment.start, segment.end))
        return f"{start} --> {end}"

    def decode_segment(self, segment: Segment) -> str:
        """Return a segment's text, with the space before it."""
        return self._decode(segment.token_ids)

    def _write_line(self, segment: Segment) -> str:
        # A blank line would end the block.
        return " ".join(self.decode_segment(segment).split())

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.decode(self.transcriber.select_text(token_ids))


class TextDeltas:
    """Tells what a growing transcript has more than before, in whole characters.

    The last tokens alone are decoded again with each new one.
    """

    def __init__(self, transcriber: Transcriber, decode: Decode) -> None:
        self._transcriber = transcriber
        self._decode = decode
        self._token_ids: list[int] = []
        self._is_cut = False
        """Whether there were tokens before these."""
        self._num_shown = 0
        """Characters of the text of these."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that tokens add; what is no whole character yet comes later."""
        self._token_ids += self._transcriber.select_text(token_ids)
        return self._take(is_last=False)

    def finish(self) -> str:
        """Return what is left."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> str:
        whole = self._decode(self._token_ids)
        whole = whole if self._is_cut else whole.lstrip()
        # Spaces at the end may be the transcript's, which has none there.
        text = (whole if is_last else whole.rstrip(REPLACEMENT)).rstrip()
        new, self._num_shown = text[self._num_shown :], max(self._num_shown, len(text))
        if len(self._token_ids) >= 2 * _NUM_DECODED:
            self._cut(len(whole) - self._num_shown)
        return new

    def _cut(self, num_left: int) -> None:
        """Forget the first tokens; so many characters at the end are still to be shown."""
        last = self._token_ids[-_NUM_DECODED:]
        num_shown = len(self._decode(last)) - num_left
        if num_shown >= 0:
            self._token_ids, self._num_shown, self._is_cut = last, num_shown, True


def _write_time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    whole, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{point}{milliseconds:03}"
