"""Files that are no clips, or far too much of one: refused in bounded time and memory."""

import io
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from mmjax.decoders.audio_file import AUDIO_CODECS, AUDIO_FORMATS, decode_audio
from mmjax.decoders.decode_workers import DecodeWorkers
from mmjax.decoders.limits import MediaLimits
from mmjax.errors import RequestError, RequestValueError
from tests.processing.test_audio_file import KINDS, WAV, tones, write_audio
from tests.processing.test_video_file import VIDEO
from tests.threats.damage import damage

LIMITS = MediaLimits(max_audio_bytes=2_000_000, max_audio_seconds=60, max_audio_rate=100_000)
RATE = 16_000


def refusal_of(workers: DecodeWorkers, data: bytes) -> RequestError:
    """Return the error that a file gives, the same apart and in a thread."""
    with pytest.raises(RequestError) as apart:
        workers.decode_audio(data, LIMITS, RATE, param="here")
    assert apart.value.param == "here"
    assert apart.value.status in (400, 422)
    with pytest.raises(RequestError) as here:
        decode_audio(data, LIMITS, RATE, param="here")
    assert type(here.value) is type(apart.value)
    return apart.value


def outcome_of(workers: DecodeWorkers, data: bytes) -> int:
    """Return how many samples a file has, or minus the status of its request's error."""
    try:
        return len(workers.decode_audio(data, LIMITS, RATE, param="here"))
    except RequestError as error:
        return -error.status


@pytest.mark.parametrize(
    ("kind", "codec", "form"), [("flac", "flac", "s16"), ("ogg", "libopus", "flt")]
)
def test_CVE_2026_54233_hours_of_silence_in_a_small_file(
    workers: DecodeWorkers, kind: str, codec: str, form: str
) -> None:
    """GHSA-6pr9-rp53-2pmc: 25 MB of Opus became 15 GB of samples."""
    minutes = np.zeros((1, 48_000 * 120), np.float32)
    data = write_audio(minutes, kind=kind, codec=codec, form=form)
    assert len(data) < minutes.nbytes / 50
    start = time.monotonic()
    error = refusal_of(workers, data)
    assert isinstance(error, RequestValueError)
    assert "at most 60 s" in str(error)
    assert time.monotonic() - start < 5


def test_CVE_2026_54233_hours_that_the_header_hides(workers: DecodeWorkers) -> None:
    """What a FLAC says of its length is not asked: its packets are."""
    silence = np.zeros((1, 48_000 * 120), np.float32)
    data = write_audio(silence, kind="flac", codec="flac", form="s16")
    # 20 bits of rate, 3 of channels, 5 of bits per sample, 36 of length.
    (fields,) = struct.unpack(">Q", data[18:26])
    for length in (0, 1, 2**36 - 1):
        hidden = (fields & ~(2**36 - 1)) | length
        error = refusal_of(workers, data[:18] + struct.pack(">Q", hidden) + data[26:])
        assert "at most 60 s" in str(error)


def test_CVE_2026_54233_headers_that_nothing_stands_behind(workers: DecodeWorkers) -> None:
    def with_field(place: int, form: str, value: int) -> bytes:
        new = struct.pack(form, value)
        return WAV[:place] + new + WAV[place + len(new) :]

    hostile = {
        "65,535 channels": with_field(22, "<H", 65_535),
        "no channels": with_field(22, "<H", 0),
        "4 GHz": with_field(24, "<I", 2**32 - 1),
        "2 GHz": with_field(24, "<I", 2**31 - 1),
        "0 Hz": with_field(24, "<I", 0),
        "101 kHz": with_field(24, "<I", 101_000),
        "no form of samples": with_field(20, "<H", 0x7777),
    }
    for name, data in hostile.items():
        assert outcome_of(workers, data) < 0, name
        refusal_of(workers, data)
    for name, data in {
        "a data chunk of 4 GiB": with_field(WAV.index(b"data") + 4, "<I", 2**32 - 1),
        "1 Hz": with_field(24, "<I", 1),
        "other sizes of blocks": with_field(32, "<H", 65_535),
        "0 bits": with_field(34, "<H", 0),
    }.items():
        assert outcome_of(workers, data) <= 60 * RATE, name
    assert outcome_of(workers, WAV) == 8000


@pytest.mark.parametrize("share", [0.0, 0.002, 0.3, 0.6, 0.95])
@pytest.mark.parametrize(("kind", "codec", "form", "_"), KINDS[::2], ids=lambda value: str(value))
def test_CVE_2026_54233_truncated_files(
    workers: DecodeWorkers, kind: str, codec: str, form: str, _: float, share: float
) -> None:
    data = write_audio(tones(48_000, 1.0), kind=kind, codec=codec, form=form)
    outcome = outcome_of(workers, data[: int(len(data) * share)])
    assert outcome in (-400, -422) or 0 < outcome <= RATE * 1.1
    assert outcome < 0 or share > 0


def test_CVE_2026_54233_no_sound_at_all(workers: DecodeWorkers) -> None:
    refusal_of(workers, VIDEO)
    for data in (b"", b"\x00" * 100, b"RIFF    WAVE", b"fLaC", b"OggS", b"ID3", b"\xff\xfb\x90"):
        refusal_of(workers, data)
    for _, marks in AUDIO_FORMATS.values():
        for mark in marks:
            refusal_of(workers, mark + b"\x00" * 2000)


def test_CVE_2026_54233_samples_that_are_no_numbers(workers: DecodeWorkers) -> None:
    for value in (np.nan, np.inf):
        channels = np.zeros((1, 100), np.float32)
        data = write_audio(channels, codec="pcm_f32le", form="flt")
        place = data.index(b"data") + 8 + 40
        bad = np.array([value], "<f4").tobytes()
        refusal_of(workers, data[:place] + bad + data[place + 4 :])


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{url}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{url}'\n",
        "<?xml version='1.0'?><MPD><Period><BaseURL>{url}</BaseURL></Period></MPD>",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n",
    ],
    ids=["CVE_2025_6242_hls", "CVE_2025_6242_concat", "CVE_2025_6242_dash", "CVE_2025_6242_sdp"],
)
def test_no_file_makes_ffmpeg_open_another(
    workers: DecodeWorkers, tmp_path: Path, text: str
) -> None:
    """Playlists name files and hosts: a format is told by its first bytes, and never guessed."""
    inner = tmp_path / "inner.wav"
    inner.write_bytes(WAV)
    for url in (f"file://{inner}", str(inner), "http://127.0.0.1:9/x.wav"):
        data = text.format(url=url).encode()
        refusal_of(workers, data)
        for place, marks in AUDIO_FORMATS.values():
            for mark in marks:
                refusal_of(workers, b"\x00" * place + mark + data)


def test_CVE_2026_54233_other_codecs_are_refused_unread(workers: DecodeWorkers) -> None:
    assert len(av.codecs_available) > 20 * len(AUDIO_CODECS)
    for codec, kind, form in (
        ("wavpack", "matroska", "s16p"),
        ("ac3", "matroska", "fltp"),
        ("pcm_s16be", "matroska", "s16"),
    ):
        refusal_of(workers, write_audio(tones(48_000, 0.2), kind=kind, codec=codec, form=form))


def _mutants(count: int) -> Iterator[bytes]:
    rng = random.Random(8)
    clip = tones(48_000, 0.2)
    files = [write_audio(clip, kind=kind, codec=codec, form=form) for kind, codec, form, _ in KINDS]
    yield from (damage(rng, rng.choice(files), first=4000) for _ in range(count))


@pytest.mark.parametrize(
    "count", [100, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])], ids=str
)
def test_CVE_2026_34755_damaged_files(workers: DecodeWorkers, count: int) -> None:
    """Each gives samples within the limits, or its request's error; the next one is served."""
    outcomes = [outcome_of(workers, data) for data in _mutants(count)]
    assert {outcome for outcome in outcomes if outcome < 0} <= {-400, -422}
    assert 0 < sum(outcome > 0 for outcome in outcomes) < count
    assert max(outcomes) <= 61 * RATE
    assert outcome_of(workers, WAV) == 8000


def test_CVE_2026_34755_what_a_process_says_of_a_clip_is_not_trusted(
    workers: DecodeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies: list[dict[str, Any]] = [
        {"num_samples": 10**12},
        {"num_samples": -1},
        {"num_samples": 0},
        {"num_samples": 1.5},
        {"num_samples": None},
        {},
    ]
    headers = [[0, 1, 1.0], [16_000, 99, 1.0], [16_000, 1, 1e9], [16_000, 1], [16_000, 1, "x"]]
    headers += [[16_000, 1, float("nan")], [16_000, 1, -1.0]]
    with monkeypatch.context() as patch:
        for reply in replies:
            patch.setattr("mmjax.decoders.worker_pool._Worker.call", lambda *args, one=reply: one)
            with pytest.raises(RequestError):
                workers.decode_audio(WAV, LIMITS, RATE, param="here")
        for header in headers:
            reply = {"header": header}
            patch.setattr("mmjax.decoders.worker_pool._Worker.call", lambda *args, one=reply: one)
            with pytest.raises(RequestError):
                workers.read_audio_header(WAV, LIMITS, param="here")
    assert outcome_of(workers, WAV) == 8000


def test_CVE_2026_54233_a_picture_in_a_clip_is_not_looked_at(workers: DecodeWorkers) -> None:
    """Covers of albums are streams of pictures: no decoder of pictures is there for them."""
    cover = b"\x89PNG\r\n\x1a\n" + b"\xff" * 64
    frame = b"\x00image/png\x00\x03\x00" + cover
    apic = b"APIC" + struct.pack(">I", len(frame)) + b"\x00\x00" + frame
    size = len(apic)
    synchsafe = bytes((size >> shift) & 0x7F for shift in (21, 14, 7, 0))
    buffer = io.BytesIO(
        write_audio(tones(48_000, 0.5), kind="mp3", codec="libmp3lame", form="fltp")
    )
    own = buffer.getvalue()
    assert own[:3] == b"ID3"
    data = b"ID3\x03\x00\x00" + synchsafe + apic + own
    assert outcome_of(workers, data) > 7000
