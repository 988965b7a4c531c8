"""Whisper's prompts: a clip for the encoder, the request's tokens for the decoder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from mmjax.errors import CheckpointError, RequestError
from mmjax.processing.encoder_budget import MultiModalProfiler
from tests.families.directories import edit_json, golden_processor
from tests.families.whisper import NUM_POSITIONS, RATE, WHISPER, write_files

START = "<|startoftranscript|><|en|><|transcribe|>"


def make_clip(num_samples: int) -> np.ndarray:
    return np.sin(np.arange(num_samples) * 0.07).astype(np.float32)


def test_a_clip_is_hfs_spectrogram_and_fills_the_encoders_prompt():
    processor = WHISPER.make_processor()
    clip = make_clip(RATE // 3)
    inputs = processor.apply(START, {"audio": clip})
    tokenizer = processor.info.get_tokenizer()
    assert inputs.prompt_token_ids == tokenizer.encode(START, add_special_tokens=False)
    assert inputs.encoder_prompt_token_ids is not None
    assert len(inputs.encoder_prompt_token_ids) == NUM_POSITIONS
    (place,) = inputs.mm_placeholders["audio"]
    assert (place.offset, place.get_num_embeds()) == (0, NUM_POSITIONS)
    (features,) = inputs.mm_kwargs.get_data()["input_features"]
    extractor = WhisperFeatureExtractor.from_pretrained(WHISPER.path())
    expected = extractor(clip, sampling_rate=RATE, return_tensors="np").input_features[0]
    np.testing.assert_allclose(features, expected, atol=1e-4)
    again = processor.apply(inputs.prompt_token_ids, {"audio": (clip, RATE)})
    assert again.mm_hashes == inputs.mm_hashes


def test_a_window_of_a_spectrogram_has_zeros_behind_it():
    processor = WHISPER.make_processor()
    window = np.ones((8, 30), np.float32)
    inputs = processor.apply(START, {"audio": {"input_features": window}})
    (features,) = inputs.mm_kwargs.get_data()["input_features"]
    assert features.shape == (8, 2 * NUM_POSITIONS)
    np.testing.assert_array_equal(features[:, :30], window)
    assert not features[:, 30:].any()


def test_dummies_are_the_largest():
    processor = WHISPER.make_processor()
    inputs = MultiModalProfiler(processor).get_dummy_mm_inputs({"audio": 1})
    assert inputs.mm_placeholders["audio"][0].get_num_embeds() == NUM_POSITIONS
    assert processor.info.get_mm_max_tokens_per_item() == {"audio": NUM_POSITIONS}


ONES = np.ones((8, 30), np.float32)
REFUSED: dict[str, tuple[Any, str]] = {
    "no clip": ({}, "has no audio"),
    "two clips": ({"audio": [make_clip(9), make_clip(9)]}, "At most 1 audio"),
    "long": ({"audio": make_clip(RATE + 1)}, "hears 1 s at once"),
    "a picture": ({"image": ONES}, "Unsupported modality: image"),
    "other keys": ({"audio": {"features": ONES}}, "must have `input_features` alone"),
    "other bins": ({"audio": {"input_features": ONES[:7]}}, r"must be float32\[8, frames\]"),
    "doubles": ({"audio": {"input_features": ONES.astype(float)}}, "is float64"),
    "no frames": ({"audio": {"input_features": ONES[:, :0]}}, "1 to 100 frames"),
    "NaN": ({"audio": {"input_features": ONES * np.nan}}, "finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_clip_is_refused(name: str):
    data, message = REFUSED[name]
    with pytest.raises(RequestError, match=message):
        WHISPER.make_processor().apply(START, data)


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        ("preprocessor_config", {"feature_size": 80}, r"makes spectrograms of \[80, 100\]"),
        ("preprocessor_config", {"chunk_length": 30}, r"the encoder takes \[8, 100\]"),
        ("generation_config", {"lang_to_id": None}, "has no `lang_to_id`"),
    ],
)
def test_files_that_contradict_each_other(
    tmp_path: Path, file: str, edit: dict[str, Any], message: str
):
    path = write_files(tmp_path)
    edit_json(path / f"{file}.json", edit)
    info = golden_processor("whisper", path=path).info
    with pytest.raises(CheckpointError, match=message):
        _ = info.transcriber
