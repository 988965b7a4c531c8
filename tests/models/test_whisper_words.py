"""Times of words are those of HF's `generate(return_token_timestamps=True)` and `_decode_asr`."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter
from transformers.models.whisper.tokenization_whisper import _decode_asr

from mmjax import LLM
from mmjax.errors import CheckpointError, RequestError
from mmjax.frontend.output.transcripts import Transcript
from mmjax.models.model_source import load_model_config
from mmjax.models.whisper.alignment import find_ends, read_alignment_heads
from mmjax.params.sampling_params import AlignmentRange, SamplingParams
from mmjax.processing.transcripts import TranscriptFallback
from tests.families.directories import with_weights
from tests.families.whisper import RATE, fill_loud, write_files
from tests.models.test_whisper_transcripts import NEARLY_GREEDY, Reference, check, make_clip

HEADS = [[1, 0], [0, 2], [1, 3]]
"""Out of order, of both layers."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write = partial(write_files, decoder_layers=2, alignment_heads=HEADS)
    return with_weights(write, fill_loud)(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, dtype="float32", max_num_seqs=2, max_num_batched_tokens=64) as llm:
        yield llm


def ask_hf(reference: Reference, samples: np.ndarray, **options: Any) -> list[dict[str, Any]]:
    """Return HF's segments, whose tokens have times; it is told where the clip ends."""
    extractor = reference.extractor
    is_long = len(samples) > extractor.n_samples
    how: dict[str, Any] = {"truncation": False, "padding": "longest"} if is_long else {}
    found = extractor(
        samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **how
    )
    with torch.no_grad():
        given = {"attention_mask": found.attention_mask, "return_token_timestamps": True}
        made: Any = reference.model.generate(
            found.input_features, return_segments=True, **given, **options
        )
    return made["segments"][0]


def check_words(
    ours: Transcript, reference: Reference, segments: list[dict[str, Any]], duration: float
) -> None:
    """Compare the tokens' times, and the words."""
    check(ours, segments)
    for mine, theirs in zip(ours.segments, segments, strict=True):
        assert mine.token_ends == pytest.approx(theirs["token_timestamps"].tolist(), abs=1e-6)
    found = {
        "tokens": torch.cat([one["tokens"] for one in segments])[None],
        "token_timestamps": torch.cat([one["token_timestamps"] for one in segments])[None],
    }
    tokenizer = reference.tokenizer
    tokenizer.language, tokenizer._strip_prompt = None, lambda token_ids, *_: token_ids
    _, chunks = _decode_asr(
        tokenizer, [found], return_timestamps="word", return_language=None, time_precision=0.02
    )
    words = [
        (one["text"].strip(), *(min(time, duration) for time in one["timestamp"]))
        for one in chunks["chunks"]
    ]
    assert [tuple(one) for one in ours.find_words()] == [
        (text, pytest.approx(start), pytest.approx(end)) for text, start, end in words
    ]
    assert words


# Not asked for times, this model may still say some, which HF's words end at.
@pytest.mark.parametrize(
    ("seconds", "seed", "has_timestamps"),
    [(0.4, 0, True), (0.4, 2, False), (1.0, 2, True), (1.0, 2, False)],
)
def test_a_short_clip(
    llm: LLM, reference: Reference, seconds: float, seed: int, has_timestamps: bool
):
    clip = make_clip(seconds, seed)
    expected = ask_hf(
        reference, clip, language="en", task="transcribe", return_timestamps=has_timestamps
    )
    ours = llm.transcribe(clip, language="en", has_timestamps=has_timestamps, has_word_times=True)
    check_words(ours, reference, expected, seconds)
    assert len({end for segment in ours.segments for end in segment.token_ends or ()}) > 2


@pytest.mark.parametrize(("seconds", "prompt"), [(3.71, ""), (3.9, "the red circle")])
def test_a_long_clip_goes_by_windows(llm: LLM, reference: Reference, seconds: float, prompt: str):
    clip, how = make_clip(seconds, 4), dict[str, Any](language="de", task="transcribe")
    if prompt:
        ids = reference.tokenizer(f"<|startofprev|> {prompt}", add_special_tokens=False).input_ids
        how["prompt_ids"] = torch.tensor(ids)
    expected = ask_hf(reference, clip, return_timestamps=True, **how)
    ours = llm.transcribe(clip, language="de", prompt=prompt, has_word_times=True)
    check_words(ours, reference, expected, seconds)
    assert len({segment.seek for segment in ours.segments}) > 1
    assert llm.engine.compilations == 0


def test_a_window_is_aligned_once_its_text_is_final(llm: LLM):
    clip = make_clip(2.2, 5)
    ours = llm.transcribe(clip, language="de", has_word_times=True)
    again = llm.transcribe(
        clip,
        language="de",
        has_word_times=True,
        fallback=TranscriptFallback(temperatures=(NEARLY_GREEDY,), logprob_threshold=0.0),
    )
    assert {one.temperature for one in again.segments} == {NEARLY_GREEDY}
    assert [(one.token_ids, one.token_ends) for one in again.segments] == [
        (one.token_ids, one.token_ends) for one in ours.segments
    ]
    without = llm.transcribe(clip, language="de")
    assert not without.find_words()
    assert all(one.token_ends is None for one in without.segments)


def test_a_language_without_spaces_is_cut_into_characters(llm: LLM):
    ours = llm.transcribe(make_clip(0.4, 0), language="en", has_word_times=True)
    (segment, *_) = ours.segments
    ids = [ours.tokenizer.convert_tokens_to_ids(one) for one in ("red", "nu")]
    ours.segments = [replace(segment, token_ids=ids, token_ends=[0.1, 0.3])]
    assert ours.find_words() == [("rednu", 0.0, 0.3)]
    ours.language = "zh"
    assert ours.find_words() == [("red", 0.0, 0.1), ("nu", 0.1, 0.3)]


@pytest.mark.parametrize("shape", [(2, 1, 7), (3, 9, 31), (1, 14, 3), (2, 40, 5), (2, 5, 1)])
def test_paths_are_hfs(shape: tuple[int, int, int]):
    """Also of few states, of equal weights, and of columns of zeros."""
    generator = np.random.default_rng(sum(shape))
    for number in range(20):
        weights = generator.random(shape).astype(np.float32)
        if number % 3 == 1:
            weights = np.round(weights * 2) / 2
        if number % 3 == 2:
            weights[:, :, shape[2] // 2 :] = 0
        given = torch.tensor(weights)
        alike = (given - given.mean(-2, keepdim=True)) / given.std(-2, keepdim=True, correction=0)
        matrix = _median_filter(alike[None], 7)[0].mean(0)
        tokens, states = _dynamic_time_warping(-matrix.double().numpy())
        jumps = np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)
        assert find_ends(weights, width=7).tolist() == states[jumps].tolist()


@pytest.mark.parametrize("heads", [[[2, 0]], [[0, -1]], [[0]], "01", [[0, True]]])
def test_heads_that_are_not_there(tmp_path: Path, heads: Any):
    path = write_files(tmp_path, decoder_layers=2, alignment_heads=heads)
    config = load_model_config(str(path)).hf_config
    with pytest.raises(CheckpointError, match="of 2 layers with 4 heads each"):
        read_alignment_heads(path, config)


def test_what_the_engine_refuses(llm: LLM):
    clip = {"audio": (make_clip(0.5), RATE)}
    prompt: Any = {"prompt_token_ids": [2, 9], "multi_modal_data": clip}
    for first, states in ((2, 5), (-1, 5), (0, 0), (0, 51)):
        wanted = AlignmentRange(first_token=first, num_states=states)
        with pytest.raises(RequestError, match="its encoder's 50 states"):
            llm.generate([prompt], SamplingParams(max_tokens=1, alignment=wanted))
    with pytest.raises(RequestError, match="give an instance of AlignmentRange"):
        SamplingParams(alignment=cast(Any, (0, 5)))
