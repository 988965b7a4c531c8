"""Transcripts of a tiny random checkpoint are those of HF's `generate`, token for token."""

import random
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

from mmjax import LLM
from mmjax.errors import CheckpointError, RequestError
from mmjax.frontend.output.transcripts import TextDeltas, Transcript
from mmjax.models.whisper.transcripts import WhisperTokens
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.transcripts import TranscriptFallback
from tests.families.directories import edit_json, with_weights
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


@pytest.mark.parametrize("language", ["german", "<|de|>"])
def test_the_files_language_is_that_of_which_nobody_says_another(language: str, tmp_path: Path):
    """As fine-tuned checkpoints name theirs."""
    path = Path(copytree(WHISPER.checkpoint, tmp_path / "model"))
    edit_json(path / "generation_config.json", {"language": language})
    clip = make_clip(1.0, 2)
    with LLM(path, dtype="float32", max_num_seqs=2, max_num_batched_tokens=64) as llm:
        ours = llm.transcribe(clip, has_timestamps=False)
        check(ours, Reference(path).transcribe(clip, task="transcribe"))
        assert ours.language == "de"
        assert llm.transcribe(clip, language="en").language == "en"


def test_a_language_of_the_files_that_the_model_does_not_know(llm: LLM, tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(
        '{"language": "klingon", "lang_to_id": {"<|en|>": 7}, "task_to_id": {"transcribe": 8}}'
    )
    with pytest.raises(CheckpointError, match=r"`language` of .* is 'klingon'"):
        WhisperTokens.read(tmp_path, llm.config.model.hf_config)


def test_sampled_tokens_obey_the_rules_too(llm: LLM):
    first = WhisperTokens.read(WHISPER.checkpoint, llm.config.model.hf_config)
    params = SamplingParams(temperature=1.0, seed=3)
    ours = llm.transcribe(make_clip(2.0, 7), language="fr", sampling_params=params)
    times_from = (first.no_timestamps_token_id or 0) + 1
    for segment in ours.segments:
        assert not set(segment.token_ids) & {*first.suppress_tokens, times_from - 1}
        times = [one for one in segment.token_ids if one >= times_from]
        assert times == sorted(times)


NEARLY_GREEDY = 1e-5
"""At which both sample what is most probable, whatever their seeds: neither is given one."""


class Judged:
    """How HF judged the windows of a clip, with thresholds at the middle of their values."""

    def __init__(self, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[float, bool, bool]] = []
        self.values: dict[str, list[float]] = {"ratio": [], "logprob": [], "silence": []}
        model: Any = reference.model
        need_fallback, find_ratio = model._need_fallback, model._retrieve_compression_ratio
        find_average = model._retrieve_avg_logprobs

        def judge(*args: Any) -> Any:
            needs, skips = need_fallback(*args)
            self.calls.append((args[-1], needs, skips))
            silence = next(one for one in args[3] if hasattr(one, "no_speech_prob"))
            self.values["silence"].append(float(silence.no_speech_prob[0]))
            return needs, skips

        def note(name: str, find: Any) -> Any:
            def found(*args: Any) -> Any:
                value = find(*args)
                self.values[name].append(float(value))
                return value

            return found

        monkeypatch.setattr(model, "_need_fallback", judge)
        monkeypatch.setattr(model, "_retrieve_compression_ratio", note("ratio", find_ratio))
        monkeypatch.setattr(model, "_retrieve_avg_logprobs", note("logprob", find_average))

    def middle(self, name: str) -> float:
        """Return a number that lies between the values of windows."""
        values = sorted({float(f"{one:.4g}") for one in self.values[name]})
        half = len(values) // 2
        assert half, f"windows are alike in {name}"
        return (values[half - 1] + values[half]) / 2


THRESHOLDS = {"compression_ratio_threshold": 99.0, "logprob_threshold": -99.0}

BY_DEFAULT = {("ratio", False), ("silence", True)}


JUDGED = [
    # By default two reasons: silence behind a text, and a ratio without one.
    pytest.param(name, text, marks=() if (name, bool(text)) in BY_DEFAULT else pytest.mark.slow)
    for name in ("ratio", "logprob", "silence")
    for text in ("", "the red circle")
]


@pytest.mark.parametrize(("name", "prompt"), JUDGED)
def test_windows_are_judged_as_hf_does(
    llm: LLM,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    prompt: str,
):
    """One reason at a time, and (of silence, which must be improbable too) two."""
    clip, judged = make_clip(4.3, 9), Judged(reference, monkeypatch)
    how: dict[str, Any] = {"language": "de", "task": "transcribe", "return_timestamps": True}
    if prompt:
        ids = reference.tokenizer(f"<|startofprev|> {prompt}", add_special_tokens=False).input_ids
        how["prompt_ids"] = torch.tensor(ids)
    thresholds = {**THRESHOLDS, "no_speech_threshold": 1.0}
    reference.transcribe(clip, temperature=0.0, **thresholds, **how)
    if name == "ratio":
        thresholds["compression_ratio_threshold"] = judged.middle("ratio")
    if name == "logprob":
        thresholds["logprob_threshold"] = judged.middle("logprob")
    if name == "silence":
        thresholds |= {"logprob_threshold": 0.0, "no_speech_threshold": judged.middle("silence")}
    judged.calls.clear()
    expected = reference.transcribe(clip, temperature=(0.0, NEARLY_GREEDY), **thresholds, **how)
    fallback = TranscriptFallback(temperatures=(NEARLY_GREEDY,), **thresholds)
    ours = llm.transcribe(clip, language="de", prompt=prompt, fallback=fallback)
    check(ours, expected)
    final = [
        (temperature, skips)
        for temperature, needs, skips in judged.calls
        if not needs or temperature == NEARLY_GREEDY
    ]
    windows = {segment.seek: segment.temperature for segment in ours.segments}
    assert list(windows.values()) == [one for one, skips in final if not skips]
    assert len({*windows.values()}) > 1 or len(windows) < len(final), "all windows went alike"
    if name == "silence":
        assert any(skips for _, skips in final)


def test_thresholds_that_say_too_little():
    with pytest.raises(RequestError, match="give both"):
        TranscriptFallback(no_speech_threshold=0.6)


def test_means_are_of_a_windows_tokens(llm: LLM):
    """Also where log-probabilities of prompts are asked for."""
    plain, asked = (
        llm.transcribe(
            CLIPS[1],
            language="en",
            sampling_params=SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=more),
        )
        for more in (None, 0)
    )
    assert plain.segments
    assert asked.segments == plain.segments


@pytest.mark.parametrize(
    ("audio", "options", "param"),
    [
        (None, {}, "audio"),
        ([], {}, "audio"),
        ([None], {}, "audio"),
        ({"input_features": np.zeros((8, 100), np.float32)}, {}, "audio"),
        (CLIPS[0], {"task": "translte"}, "task"),
    ],
)
def test_what_is_no_clip_is_named(llm: LLM, audio: Any, options: dict[str, Any], param: str):
    with pytest.raises(RequestError, match=f"`{param}`") as caught:
        llm.transcribe(audio, **options)
    assert caught.value.param == param


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


def test_growing_text_is_the_whole_one_and_decodes_few_tokens_at_once(llm: LLM):
    ours = llm.transcribe(make_clip(1.0, 8), language="en")
    rng, longest = random.Random(0), 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return ours.decode(token_ids)

    words = [
        ours.tokenizer.encode(word, add_special_tokens=False) for word in (" a", " é", "日", " ")
    ]
    token_ids = [one for _ in range(500) for one in rng.choice(words)]
    deltas = TextDeltas(ours.transcriber, decode)
    pieces = [deltas.add([one]) for one in token_ids]
    assert longest < 200 < len(token_ids)
    assert "".join([*pieces, deltas.finish()]) == ours.decode(token_ids).strip()
