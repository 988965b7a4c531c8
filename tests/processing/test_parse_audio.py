"""Samples in all their forms -> clips at the model's rate."""

import base64
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmjax.errors import ConfigError, RequestRuntimeError, RequestTypeError, RequestValueError
from mmjax.processing import (
    AudioEmbeddingItems,
    AudioProcessorItems,
    MediaLimits,
    MediaWithBytes,
    MultiModalDataParser,
)
from tests.processing.test_audio_file import write_audio

CLIP = np.array([0.0, 0.25, -0.5, 0.75])
LIMITS = MediaLimits(max_audio_samples=20_000)
plain = MultiModalDataParser(limits=LIMITS)
mono = MultiModalDataParser(target_sr=16_000, target_channels=1, limits=LIMITS)


def parse(data: Any, parser: MultiModalDataParser = plain) -> AudioProcessorItems:
    return parser.parse_mm_data({"audio": data}).get_items("audio", AudioProcessorItems)


def tone(rate: int, seconds: float = 0.25, hertz: float = 440.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)


FORMS = {
    "list of floats": CLIP.tolist(),
    "tuple of floats": tuple(CLIP.tolist()),
    "numpy": CLIP,
    "float32": CLIP.astype(np.float32),
    "float16": CLIP.astype(np.float16),
    "jax": jnp.asarray(CLIP),
    "bfloat16": jnp.asarray(CLIP, jnp.bfloat16),
    "torch": torch.from_numpy(CLIP),
    "int16": (CLIP * 2**15).astype(np.int16),
    "int32": (CLIP * 2**31).astype(np.int32),
    "uint8": (CLIP * 128 + 128).astype(np.uint8),
    "with its rate": (CLIP, 16_000),
    "with bytes": MediaWithBytes((CLIP, 16_000.0), b"wav"),
    "two channels with bytes": MediaWithBytes(np.stack([CLIP, CLIP]), b"wav"),
    "list with its rate": (CLIP.tolist(), 16_000),
    "one channel": [CLIP[None]],
    "two channels": [np.stack([CLIP, CLIP])],
    "channels last": [(np.stack([CLIP, CLIP], axis=1), 16_000)],
    "stereo": [(np.stack([CLIP + 0.1, CLIP - 0.1]).T, 16_000)],
    "as torchaudio loads it": (torch.from_numpy(CLIP)[None].float(), 16_000),
    "jax with its rate": (jnp.asarray(CLIP)[None], 16_000),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_a_clip_gives_the_same_samples(form: Any):
    items = parse(form, mono)
    assert len(items) == 1
    (samples,) = items.get_processor_data()["audios"]
    assert isinstance(samples, np.ndarray)
    np.testing.assert_allclose(samples, CLIP, atol=1e-7)


def test_what_is_one_clip_and_what_are_several():
    assert plain.parse_mm_data({"audio": None}) == {}
    assert len(parse([])) == 0
    assert len(parse([CLIP, CLIP])) == 2
    assert len(parse(np.stack([CLIP, CLIP, CLIP]))) == 3
    assert len(parse(jnp.stack([CLIP, CLIP, CLIP]))) == 3
    assert len(parse(np.zeros((2, 3, 4)))) == 2
    assert len(parse([CLIP.tolist(), CLIP.tolist()])) == 2
    assert len(parse((CLIP, CLIP))) == 2
    assert len(parse([(CLIP, 16_000), CLIP], mono)) == 2


def test_an_array_stays_the_object_that_it_is():
    assert parse(CLIP).get(0) is CLIP
    assert parse((CLIP, 16_000), mono).get(0).base is CLIP


def test_none_keeps_its_place():
    items = parse([CLIP, None, CLIP])
    assert [item is None for item in items.get_all()] == [False, True, False]
    assert items.select([1, 2]).get(0) is None


def test_channels_stay_where_the_model_asks_for_none():
    both = np.zeros((2, 9))
    assert parse([both]).get(0) is both
    stereo = MultiModalDataParser(target_channels=2)
    assert parse([both.T], stereo).get(0).shape == (2, 9)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 16_001])
def test_a_tone_stays_a_tone_at_another_rate(rate: int):
    got = parse((tone(rate), rate), mono).get(0)
    want = tone(16_000)
    assert abs(len(got) - len(want)) <= 1
    middle = slice(400, -400)  # the ends fade: the filter sees silence beyond them
    np.testing.assert_allclose(got[: len(want)][middle], want[middle], atol=2e-3)


def test_long_doubles_are_resampled_as_doubles():
    clip = tone(8_000)
    (found,) = parse((clip.astype(np.longdouble), 8_000), mono).get_all()
    np.testing.assert_array_equal(found, parse((clip, 8_000), mono).get(0))


def test_frequencies_that_the_new_rate_cannot_hold_are_filtered_out():
    got = parse((tone(48_000, hertz=12_000), 48_000), mono).get(0)
    assert np.abs(got[400:-400]).max() < 1e-2


@given(
    n=st.integers(1, 300), rate=st.sampled_from([1000, 8000, 44_100]), dtype=st.sampled_from("fd")
)
def test_resampling_keeps_the_length_in_time(n: int, rate: int, dtype: str):
    parser = MultiModalDataParser(target_sr=2000)
    got = parse([(np.ones((2, n), dtype), rate)], parser).get(0)
    assert got.dtype == dtype
    longest = max(2, n)
    assert max(got.shape) == max(-(-longest * 2000 // rate), min(2, n))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ("no.wav", RequestValueError, "audio file `no.wav` cannot be read"),
        ([Path("no.wav")], RequestValueError, "audio file `no.wav` cannot be read"),
        ("https://a.example/a.wav", RequestValueError, "fetched for messages alone .`audio_url`"),
        ("data:audio/wav,AAAA", RequestValueError, "only base64"),
        (7, RequestTypeError, r"audio\[0\] has the type `int`"),
        ([0.5, "x"], RequestTypeError, "other things than numbers"),
        ([0.5, None], RequestTypeError, "other things than numbers"),
        ([CLIP, object()], RequestTypeError, r"audio\[1\] has the type `object`"),
        ([[]], RequestValueError, "no samples"),
        (np.zeros(0), RequestValueError, "no samples"),
        (np.float64(3), RequestValueError, r"shape \(\)"),
        ([np.zeros((1, 2, 3))], RequestValueError, r"shape \(1, 2, 3\)"),
        (np.zeros(20_001), RequestValueError, "20001 samples, at most 20000"),
        ([0.0] * 20_001, RequestValueError, "20001 samples, at most 20000"),
        ((np.zeros(300), 100), RequestValueError, "48000 samples, at most 20000"),
        ((CLIP, 0), RequestValueError, "sampling rate 0"),
        ((CLIP, -1), RequestValueError, "sampling rate -1"),
        ((CLIP, float("nan")), RequestValueError, "sampling rate nan"),
        ((CLIP, 44_100.5), RequestValueError, "sampling rate 44100.5"),
        ((CLIP, 10**9), RequestValueError, "sampling rate 1000000000"),
        ((np.zeros(20_001), 10), RequestValueError, "20001 samples"),
        ((np.zeros((9, 10)), 16_000), RequestValueError, "9 channels; it must have 1 to 8"),
        ((np.zeros(19_000), 10), RequestValueError, r"lasts 1900\.0 s, at most 1800 s"),
        (np.array([0.0, np.nan]), RequestValueError, "NaN or infinite"),
        ([0.0, float("inf")], RequestValueError, "NaN or infinite"),
        (np.array([1, 2]), RequestTypeError, "dtype int64"),
        (np.array([1j]), RequestTypeError, "dtype complex128"),
        (np.array(["a"]), RequestTypeError, "dtype <U1"),
    ],
)
def test_other_things_are_refused(data: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        parse(data, mono)


def test_files_are_read_where_they_are_given(tmp_path: Path):
    data = write_audio(tone(8_000)[None], 8_000, codec="pcm_f32le", form="flt")
    path = tmp_path / "tone.wav"
    path.write_bytes(data)
    url = "data:audio/wav;base64," + base64.b64encode(data).decode()
    want = parse((tone(8_000), 8_000), mono).get(0)
    for form in (data, bytearray(data), path, str(path), url, [path, data]):
        for got in parse(form, mono).get_all():
            np.testing.assert_allclose(got, want, atol=1e-6)


def test_settings_that_cannot_hold_are_named():
    with pytest.raises(RequestRuntimeError, match="`target_sr` is not provided"):
        parse((CLIP, 8_000))
    with pytest.raises(ConfigError, match="`soxr` is unknown; choose `scipy`"):
        MultiModalDataParser(audio_resample_method="soxr")
    with pytest.raises(ConfigError, match=r"target_sr is 0\.5"):
        MultiModalDataParser(target_sr=0.5)
    with pytest.raises(RequestValueError, match="has 1 channels, the model takes 2"):
        parse(CLIP, MultiModalDataParser(target_channels=2))
    with pytest.raises(RequestValueError, match="has 3 channels, the model takes 2"):
        parse([np.zeros((3, 9))], MultiModalDataParser(target_channels=2))


def test_embeddings_of_audio():
    embeds = [jnp.ones((7, 16)), jnp.ones((5, 16))]
    items = plain.parse_mm_data({"audio": embeds}).get_items("audio", AudioEmbeddingItems)
    assert [items.get_feature_size(index) for index in range(2)] == [7, 5]
    assert list(items.get_passthrough_data()) == ["audio_embeds"]
