"""Clips' files: their samples, of one channel, at the rate that is asked for."""

import io
from typing import Any

import av
import numpy as np
import pytest

from mmjax.decoders.audio_file import (
    decode_audio,
    decode_sound,
    read_audio_header,
    read_sound_header,
    resample,
)
from mmjax.decoders.decode_workers import DecodeWorkers
from mmjax.decoders.limits import MediaLimits
from mmjax.errors import MediaError, RequestRuntimeError, RequestValueError
from mmjax.processing.hashing.item_hashes import ItemHasher
from mmjax.processing.items.items import AudioProcessorItems, MultiModalDataItems
from mmjax.processing.items.parse import MultiModalDataParser
from mmjax.processing.media.encoded import EncodedAudio, EncodedVideo

KINDS: list[tuple[str, str, str, float]] = [
    ("wav", "pcm_s16le", "s16", 1e-4),
    ("wav", "pcm_u8", "u8", 1e-2),
    ("wav", "pcm_s24le", "s32", 1e-6),
    ("wav", "pcm_f32le", "flt", 1e-6),
    ("wav", "pcm_mulaw", "s16", 3e-2),
    ("flac", "flac", "s16", 1e-4),
    ("mp3", "libmp3lame", "fltp", 3e-2),
    ("ogg", "vorbis", "fltp", 1.0),
    ("webm", "vorbis", "fltp", 1.0),
    ("ogg", "libopus", "flt", 5e-2),
    ("webm", "libopus", "flt", 5e-2),
    ("mp4", "aac", "fltp", 1e-1),
]
"""Container, encoder, the form of its samples, and how far they may be from what was written."""


def tones(rate: int, seconds: float, num_channels: int = 2) -> np.ndarray:
    """Return float64[C, T]: another tone in each channel."""
    time = np.arange(round(rate * seconds)) / rate
    return np.stack([0.4 * np.sin(2 * np.pi * 220 * (n + 1) * time) for n in range(num_channels)])


def write_audio(
    channels: np.ndarray,
    rate: int = 48_000,
    *,
    kind: str = "wav",
    codec: str = "pcm_s16le",
    form: str = "s16",
) -> bytes:
    """Return a file of float[C, T] samples."""
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(channels)]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream: Any = container.add_stream(
            codec, rate=rate, layout=layout, options={"strict": "experimental"}
        )
        stream.format = form
        resampler = av.AudioResampler(format=form, layout=layout, rate=rate)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(channels, np.float32), format="fltp", layout=layout
        )
        frame.sample_rate, frame.pts = rate, 0
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def write_heard_video(
    num_frames: int = 8, seconds: float = 0.9, *, kind: str = "mp4", codec: str = "aac"
) -> bytes:
    """Return a file of frames, 8 a second, and of a tone; without a codec it is silent."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        video: Any = container.add_stream("mpeg4", rate=8)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        sound: Any = codec and container.add_stream(codec, rate=16_000, layout="mono")
        for place in range(num_frames):
            pixels = np.full((48, 64, 3), 20 * place, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        frame = av.AudioFrame.from_ndarray(
            tones(16_000, seconds).astype(np.float32)[:1], format="fltp", layout="mono"
        )
        frame.sample_rate, frame.pts = 16_000, 0
        for stream, last in ((sound, frame), (sound, None), (video, None)):
            if stream:
                container.mux(stream.encode(last))
    return buffer.getvalue()


WAV = write_audio(tones(48_000, 0.5))


@pytest.mark.parametrize(("kind", "codec", "form", "atol"), KINDS)
def test_a_file_gives_the_mean_of_its_channels(
    kind: str, codec: str, form: str, atol: float, workers: DecodeWorkers
) -> None:
    channels = tones(48_000, 0.5)
    data = write_audio(channels, kind=kind, codec=codec, form=form)
    header = read_audio_header(data, MediaLimits())
    assert header[:2] == (48_000, 2)
    assert header.seconds == pytest.approx(0.5, abs=0.1)
    samples = decode_audio(data, MediaLimits(), 48_000)
    assert samples.dtype == np.float32
    want = channels.mean(axis=0)
    assert len(want) <= len(samples) <= len(want) + 4096
    # Not every file says how much of its beginning is the encoder's delay.
    middle, padded = slice(4000, -4000), np.pad(samples, 2000)
    shifts = range(len(padded) - len(want) + 1)
    best = min(np.abs(padded[s : s + len(want)][middle] - want[middle]).max() for s in shifts)
    if codec == "vorbis":  # FFmpeg's own encoder is rough
        found, expected = (np.abs(np.fft.rfft(one[4000:20000])) for one in (samples, want))
        assert set(found.argsort()[-2:]) == set(expected.argsort()[-2:])
    else:
        assert best < atol
    for rate in (16_000, 44_100):
        here = decode_audio(data, MediaLimits(), rate)
        np.testing.assert_array_equal(here, resample(samples, 48_000, rate))
        apart = workers.decode_audio(data, MediaLimits(), rate, param=None)
        np.testing.assert_array_equal(apart, here)
    assert workers.read_audio_header(data, MediaLimits(), param=None) == header


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "aac"), ("matroska", "libopus"), ("avi", "libmp3lame")]
)
def test_the_sound_of_a_video(kind: str, codec: str, workers: DecodeWorkers) -> None:
    """Under the limits of clips, but for the file's bytes; in a process, and where it is asked."""
    data, limits = write_heard_video(kind=kind, codec=codec), MediaLimits(max_audio_bytes=1)
    header = read_sound_header(data, limits)
    assert header is not None
    assert header.seconds == pytest.approx(0.9, abs=0.15)
    samples = decode_sound(data, limits, 16_000)
    assert len(samples) == pytest.approx(0.9 * 16_000, abs=2000)
    # The tone of 220 Hz.
    loudest = np.abs(np.fft.rfft(samples)).argmax() * 16_000 / len(samples)
    assert loudest == pytest.approx(220, abs=3)
    assert workers.read_sound_header(data, limits, param=None) == header
    apart = workers.decode_sound(data, limits, 16_000, param=None)
    np.testing.assert_array_equal(apart, samples)
    short = MediaLimits(max_audio_seconds=0)
    for decode in (decode_sound, workers.decode_sound):
        with pytest.raises(RequestValueError, match="at most 0 s are accepted"):
            decode(data, short, 16_000, param="here")
        with pytest.raises(RequestValueError, match="video has"):
            decode(data, MediaLimits(max_video_bytes=9), 16_000, param="here")


def test_a_silent_video_has_no_sound(workers: DecodeWorkers) -> None:
    data = write_heard_video(codec="")
    for here in (True, False):
        read, decode = (
            (read_sound_header, decode_sound)
            if here
            else (workers.read_sound_header, workers.decode_sound)
        )
        assert read(data, MediaLimits(), param=None) is None
        assert decode(data, MediaLimits(), 16_000, param=None).shape == (0,)
    with pytest.raises(MediaError, match="it has no sound"):
        decode_audio(data, MediaLimits(), 16_000)


@pytest.mark.parametrize("num_channels", [1, 2, 6])
@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 96_000])
def test_a_file_and_its_samples_are_the_same_clip(rate: int, num_channels: int) -> None:
    channels = tones(rate, 0.3, num_channels).astype(np.float32)
    data = write_audio(channels, rate, codec="pcm_f32le", form="flt")
    parser = MultiModalDataParser(target_sr=16_000, target_channels=1)
    items = parser.parse_mm_data({"audio": [data, (channels, rate)]})["audio"]
    file, samples = items.get_all()
    np.testing.assert_allclose(file, samples, atol=1e-6)
    assert len(file) == 4800


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (MediaLimits(max_audio_bytes=100), "encoded bytes, at most 100"),
        (MediaLimits(max_audio_rate=47_999), "sampling rate 48000; .* from 1 to 47999"),
        (MediaLimits(max_audio_channels=1), "2 channels; it must have 1 to 1"),
        (MediaLimits(max_audio_samples=23_999), "24000 samples, at most 23999"),
    ],
)
def test_limits_hold_before_a_sample_is_decoded(
    limits: MediaLimits, message: str, workers: DecodeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr("mmjax.decoders.audio_file._decode", refuse)
    refusals = [
        lambda: decode_audio(WAV, limits, 16_000, param="here"),
        lambda: read_audio_header(WAV, limits, param="here"),
        lambda: workers.decode_audio(WAV, limits, 16_000, param="here"),
        lambda: workers.read_audio_header(WAV, limits, param="here"),
    ]
    for refusal in refusals:
        with pytest.raises(RequestValueError, match=message) as caught:
            refusal()
        assert caught.value.param == "here"


def test_a_limit_of_seconds() -> None:
    data = write_audio(np.zeros((1, 8_000 * 3)), 8_000, kind="flac", codec="flac")
    assert len(decode_audio(data, MediaLimits(max_audio_seconds=3), 8_000)) == 24_000
    with pytest.raises(RequestValueError, match=r"lasts 3\.0 s, at most 2 s"):
        decode_audio(data, MediaLimits(max_audio_seconds=2), 8_000)
    with pytest.raises(RequestValueError, match="144000 samples, at most 100000"):
        decode_audio(data, MediaLimits(max_audio_samples=100_000), 48_000)


# ---- items --------------------------------------------------------------------------------------


def encoded(data: bytes = WAV, **options: Any) -> EncodedAudio:
    return EncodedAudio(data, MediaLimits(), "here", **options)


def test_an_encoded_clip_is_an_item() -> None:
    items = AudioProcessorItems([encoded(), None], rate=16_000)
    assert items.count_bytes_to_decode(0) == 24_000 * 4
    (samples, missing) = items.get_processor_data()["audios"]
    assert samples.shape == (8000,)
    assert missing is None
    assert items.count_bytes_to_decode(0) == 0
    assert items.get(0) is samples
    assert items.get_param(0) == "here"
    items.drop_decoded()
    assert items.count_bytes_to_decode(0) > 0
    with pytest.raises(RequestRuntimeError, match="`target_sr` is not provided"):
        AudioProcessorItems([encoded()]).get(0)


def test_a_clip_is_known_by_its_bytes() -> None:
    def hash_of(modality: str, *media: Any) -> list[str]:
        items = MultiModalDataItems({modality: AudioProcessorItems(list(media))})
        return ItemHasher("model").identify(items, {}, {}).by_modality[modality]

    other = write_audio(tones(48_000, 0.5) * 0.9)
    video = EncodedVideo(WAV, MediaLimits(), "here")
    hashes = hash_of("audio", encoded(), encoded(other), video)
    assert len(set(hashes)) == 3
    assert hash_of("audio", encoded()) == hashes[:1]


def test_a_file_that_is_no_clip() -> None:
    with pytest.raises(MediaError) as caught:
        encoded(b"GIF89a" * 10, explain=lambda error: MediaError("told", param="x")).decode(1)
    assert str(caught.value) == "told"
