"""Transcripts of a tiny random checkpoint are those of HF's `generate`, token for token."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

from mmjax import LLM
from mmjax.errors import RequestError
from mmjax.frontend.output.transcripts import TextDeltas, Transcript
from mmjax.models.whisper.transcripts import WhisperTokens
from mmjax.params.sampling_params import SamplingParams
from tests.families.directories import with_weights
from tests.families.whisper import RATE, WHISPER, fill_loud, write_files


def make_clip(seconds: float, seed: int = 0) -> np.ndarray:
    """Return tones over noise, of which each second is another."""
    time = np.arange(int(seconds * RATE)) / RATE
    generator = np.random.default_rng(seed)
    pitches = generator.uniform(100, 4000, int(seconds) + 1)[time.astype(int)]
    return (np.sin(2 * np.pi * pitches * time) + 0.1 * generator.normal(size=len(time))).astype(
        np.float32
    )


class Reference:
    """HF's model, tokenizer and feature extractor of a directory."""

    def __init__(self, path: Path) -> None:
        self.model = WhisperForConditionalGeneration.from_pretrained(path).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.extractor = WhisperFeatureExtractor.from_pretrained(path)

    def transcribe(self, samples: np.ndarray, **options: Any) -> list[dict[str, Any]]:
        """Return the segments that `generate` gives."""
        is_long = len(samples) > self.extractor.n_samples
        how: dict[str, Any] = {"truncation": False, "padding": "longest"} if is_long else {}
        features = self.extractor(samples, sampling_rate=RATE, return_tensors="pt", **how)
        with torch.no_grad():
            found: Any = self.model.generate(
                features.input_features, return_segments=True, **options
            )
        return found["segments"][0]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(WHISPER.checkpoint)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(WHISPER.checkpoint, dtype="float32", max_num_seqs=2, max_num_batched_tokens=64) as llm:
        yield llm


def check(transcript: Transcript, segments: Sequence[dict[str, Any]]) -> None:
    """Compare tokens and times."""
    ours = [list(one.token_ids) for one in transcript.segments]
    assert ours == [one["tokens"].tolist() for one in segments]
    for mine, theirs in zip(transcript.segments, segments, strict=True):
        assert (mine.start, mine.end) == pytest.approx(
            (float(theirs["start"]), float(theirs["end"]))
        )


CLIPS = [make_clip(0.4, 1), make_clip(1.0, 2), make_clip(0.9, 3)]


@pytest.mark.parametrize("clip", CLIPS, ids=["short", "whole window", "other"])
@pytest.mark.parametrize("language", ["de", "french", None])
def test_a_short_clip_without_times(
    llm: LLM, reference: Reference, clip: np.ndarray, language: str | None
):
    ours = llm.transcribe(clip, language=language, has_timestamps=False)
    check(ours, reference.transcribe(clip, language=language, task="transcribe"))
    assert ours.language in {"en", "de", "fr"}
    assert language is None or ours.language == language[:2]
    suppressed = {5, 6, 7}
    assert not suppressed & {one for segment in ours.segments for one in segment.token_ids}


@pytest.mark.parametrize("clip", CLIPS, ids=["short", "whole window", "other"])
def test_a_short_clip_with_times(llm: LLM, reference: Reference, clip: np.ndarray):
    expected = reference.transcribe(clip, language="en", task="transcribe", return_timestamps=True)
    check(llm.transcribe(clip, language="en"), expected)


@pytest.mark.parametrize("seconds", [1.2, 3.71])
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_a_long_clip_goes_by_windows(llm: LLM, reference: Reference, seconds: float, task: Any):
    clip = make_clip(seconds, 4)
    ours = llm.transcribe(clip, task=task, has_timestamps=False)
    check(ours, reference.transcribe(clip, task=task, return_timestamps=True))
    assert len({segment.seek for segment in ours.segments}) > 1
    first = reference.tokenizer.convert_tokens_to_ids("<|0.00|>")
    assert all(one.token_ids[0] >= first for one in ours.segments if one.token_ids)


def test_a_text_before_is_before_each_window(llm: LLM, reference: Reference):
    clip, text = make_clip(2.3, 5), "the red circle"
    ids = reference.tokenizer(f"<|startofprev|> {text}", add_special_tokens=False).input_ids
    expected = reference.transcribe(
        clip,
        language="de",
        task="transcribe",
        return_timestamps=True,
        prompt_ids=torch.tensor(ids),
    )
    check(llm.transcribe(clip, language="de", prompt=text), expected)
    without = llm.transcribe(clip, language="de")
    assert [one.token_ids for one in without.segments] != [
        one["tokens"].tolist() for one in expected
    ]


def test_a_model_of_one_language(tmp_path: Path):
    write = partial(write_files, is_multilingual=False)
    path = with_weights(write, fill_loud)(tmp_path)
    reference, clip = Reference(path), make_clip(1.8, 6)
    with LLM(path, dtype="float32", max_num_seqs=2, max_num_batched_tokens=64) as llm:
        check(llm.transcribe(clip), reference.transcribe(clip, return_timestamps=True))
        for options in ({"language": "en"}, {"task": "translate"}):
            with pytest.raises(RequestError, match="knows English alone"):
                llm.transcribe(clip, **options)


def test_sampled_tokens_obey_the_rules_too(llm: LLM):
    first = WhisperTokens.read(WHISPER.checkpoint, llm.config.model.hf_config)
    params = SamplingParams(temperature=1.0, seed=3)
    ours = llm.transcribe(make_clip(2.0, 7), language="fr", sampling_params=params)
    times_from = (first.no_timestamps_token_id or 0) + 1
    for segment in ours.segments:
        assert not set(segment.token_ids) & {*first.suppress_tokens, times_from - 1}
        times = [one for one in segment.token_ids if one >= times_from]
        assert times == sorted(times)


def test_subtitles_and_growing_text(llm: LLM):
    ours = llm.transcribe(make_clip(2.5, 8), language="en")
    first, *_ = blocks = ours.to_srt().split("\n\n")
    assert re.match(r"1\n00:00:0\d,\d{3} --> 00:00:0\d,\d{3}\n", first)
    assert len(blocks) == len(ours.segments)
    assert re.match(r"WEBVTT\n\n00:00:0\d\.\d{3} --> 00:00:0\d\.\d{3}\n", ours.to_vtt())
    assert all(segment.end <= 2.5 or ours.cut(segment.end) == 2.5 for segment in ours.segments)
    deltas = TextDeltas(ours.transcriber, ours.decode)
    token_ids = [one for segment in ours.segments for one in segment.token_ids]
    pieces = [deltas.add([one]) for one in token_ids]
    assert "".join([*pieces, deltas.finish()]) == ours.text
    assert ours.text
