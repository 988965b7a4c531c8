"""Files that are no videos, or far too much of one: refused in bounded time and memory."""

import io
import math
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from mmjax.decoders.decode_workers import DecodeWorkers
from mmjax.decoders.limits import MediaLimits
from mmjax.decoders.video_file import VIDEO_CODECS, VIDEO_FORMATS, VideoSampling, decode_frames
from mmjax.errors import RequestError
from tests.processing.test_video_file import KINDS, VIDEO, write_video
from tests.threats.damage import damage

LIMITS = MediaLimits(max_video_bytes=2_000_000, max_image_pixels=100_000, max_video_pixels=10**6)
SAMPLING = VideoSampling(4)


def refusal_of(workers: DecodeWorkers, data: bytes) -> RequestError:
    """Return the error that a file gives, the same apart and in a thread."""
    with pytest.raises(RequestError) as apart:
        workers.decode_frames(data, LIMITS, SAMPLING, param="here")
    assert apart.value.param == "here"
    assert apart.value.status in (400, 422)
    with pytest.raises(RequestError) as here:
        decode_frames(data, LIMITS, SAMPLING, param="here")
    assert type(here.value) is type(apart.value)
    return apart.value


def outcome_of(workers: DecodeWorkers, data: bytes, sampling: VideoSampling = SAMPLING) -> Any:
    """Return the shape of a file's frames, or the status of its request's error."""
    try:
        return workers.decode_frames(data, LIMITS, sampling, param="here")[0].shape
    except RequestError as error:
        return error.status


def patched(data: bytes, mark: bytes, place: int, new: bytes) -> bytes:
    """Return `data` with `new` at `place` behind the first `mark`."""
    start = data.index(mark) + len(mark) + place
    return data[:start] + new + data[start + len(new) :]


def test_CVE_2026_5497_sizes_and_numbers_that_only_a_header_has(workers: DecodeWorkers) -> None:
    most = struct.pack(">I", 2**31 - 1)
    avc1 = struct.pack(">HH", 65535, 65535)
    hostile = {
        "width and height": patched(VIDEO, b"avc1", 4 + 2 + 2 + 16, avc1),
        "samples": patched(VIDEO, b"stsz", 8, most),
        "duration": patched(VIDEO, b"mvhd", 4 + 8 + 4, most),
        "runs of samples": patched(VIDEO, b"stts", 8, most + most),
        "chunks": patched(VIDEO, b"stco", 4, most),
    }
    for name, data in hostile.items():
        outcome = outcome_of(workers, data)
        assert outcome in (400, 422) or outcome[0] <= 4, name
    assert len(workers.decode_frames(VIDEO, LIMITS, SAMPLING, param=None)[0]) == 4


def test_CVE_2026_5497_larger_frames_than_allowed(workers: DecodeWorkers) -> None:
    error = refusal_of(workers, write_video(4, size=(640, 480)))
    assert "640x480 = 307200 pixels" in str(error)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_CVE_2026_5497_truncated_files(workers: DecodeWorkers, kind: str, share: float) -> None:
    data = write_video(kind=kind, codec="libx264" if kind == "mp4" else "libvpx")
    data = data[: int(len(data) * share)]
    if kind == "mp4" or share < 0.1:  # its table is at the end
        refusal_of(workers, data)
    else:
        frames, header, _ = workers.decode_frames(data, LIMITS, SAMPLING, param=None)
        assert len(frames) == 4
        assert header.total_num_frames < 40


def test_CVE_2026_5497_thousands_of_streams(workers: DecodeWorkers) -> None:
    refusal_of(workers, write_video(2, num_streams=40))
    start = VIDEO.index(b"trak") - 4
    (size,) = struct.unpack(">I", VIDEO[start : start + 4])
    moov = VIDEO.index(b"moov") - 4
    (moov_size,) = struct.unpack(">I", VIDEO[moov : moov + 4])
    track = VIDEO[start : start + size] * 3000
    data = VIDEO[: start + size] + track + VIDEO[start + size :]
    data = data[:moov] + struct.pack(">I", moov_size + len(track)) + data[moov + 4 :]
    refusal_of(workers, data)


def test_CVE_2026_5497_no_frames_and_no_picture_at_all(workers: DecodeWorkers) -> None:
    sound = io.BytesIO()
    with av.open(sound, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=8000)
        silence = np.zeros((1, 1024), np.float32)
        frame: Any = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    refusal_of(workers, sound.getvalue())
    refusal_of(workers, patched(VIDEO, b"stsz", 8, bytes(4)))
    for data in (
        b"",
        b"\x00" * 100,
        b"\x00\x00\x00\x08ftypisom",
        b"\x1aE\xdf\xa3",
        b"RIFF    AVI ",
    ):
        refusal_of(workers, data)


def test_CVE_2026_5497_frames_that_change_their_size(workers: DecodeWorkers) -> None:
    small, large = (
        write_video(3, size=size, kind="avi", codec="mpeg4") for size in ((64, 48), (96, 80))
    )
    joined = small.replace(b"idx1", b"JUNK") + large[large.index(b"movi") :]
    outcome = outcome_of(workers, joined, VideoSampling(-1))
    assert outcome in (400, 422) or outcome[1:] == (48, 64, 3)


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{url}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{url}'\n",
        "<?xml version='1.0'?><MPD><Period><BaseURL>{url}</BaseURL></Period></MPD>",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    ],
    ids=["CVE_2025_6242_hls", "CVE_2025_6242_concat", "CVE_2025_6242_dash", "CVE_2025_6242_sdp"],
)
def test_no_file_makes_ffmpeg_open_another(
    workers: DecodeWorkers, tmp_path: Path, text: str
) -> None:
    """Playlists name files and hosts: a format is told by its first bytes, and never guessed."""
    inner = tmp_path / "inner.mp4"
    inner.write_bytes(VIDEO)
    for url in (f"file://{inner}", str(inner), "http://127.0.0.1:9/x.mp4", "concat:" + str(inner)):
        data = text.format(url=url).encode()
        refusal_of(workers, data)
        for _, (mark,) in VIDEO_FORMATS.values():
            refusal_of(workers, b"\x00\x00\x00\x18" + mark + data)


def test_CVE_2026_5497_other_codecs_are_refused_unread(workers: DecodeWorkers) -> None:
    assert len(av.codecs_available) > 20 * len(VIDEO_CODECS)
    for codec, kind in (("mpeg1video", "matroska"), ("ffv1", "matroska"), ("huffyuv", "avi")):
        options: dict[str, Any] = {} if codec == "mpeg1video" else {"strict": "experimental"}
        try:
            data = write_video(3, kind=kind, codec=codec, rate=25, **options)
        except (OSError, ValueError):
            continue
        refusal_of(workers, data)


def _mutants(count: int) -> Iterator[bytes]:
    rng = random.Random(8)
    files = [write_video(12, kind=kind, codec=codec, **more) for kind, codec, more in KINDS]
    yield from (damage(rng, rng.choice(files)) for _ in range(count))


@pytest.mark.parametrize(
    "count", [40, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])], ids=str
)
def test_CVE_2026_34755_damaged_files(workers: DecodeWorkers, count: int) -> None:
    """Each gives frames within the limits, or its request's error; the next one is served."""
    num_decoded = 0
    for data in _mutants(count):
        outcome = outcome_of(workers, data)
        if outcome not in (400, 422):
            num_decoded += 1
            assert outcome[0] <= 4
            assert math.prod(outcome) <= 3 * LIMITS.max_video_pixels
    assert 0 < num_decoded < count
    assert len(workers.decode_frames(VIDEO, LIMITS, SAMPLING, param=None)[0]) == 4


def test_CVE_2026_34755_what_a_process_says_of_a_video_is_not_trusted(
    workers: DecodeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"header": [64, 48, 4, 40, 10.0], "size": [64, 48], "indices": [0, 1, 2, 3]}
    bad: list[dict[str, Any]] = [
        {"header": [64, 48, 10**6, 40, 10.0]},
        {"header": [64, 48, 4, 40, "x"]},
        {"header": [64, 48, 4, 40, float("nan")]},
        {"header": [64, 48, 4, 40]},
        {"header": [10**6, 10**6, 4, 40, 10.0]},
        {"size": [10**6, 10**6]},
        {"size": [64]},
        {"indices": [0, 1]},
        {"indices": [0, 1, 2, -3]},
    ]
    for change in bad:
        with monkeypatch.context() as patch:
            patch.setattr(
                "mmjax.decoders.worker_pool._Worker.call", lambda *args, one=change: {**good, **one}
            )
            with pytest.raises(RequestError):
                workers.decode_frames(VIDEO, LIMITS, SAMPLING, param="here")
    assert len(workers.decode_frames(VIDEO, LIMITS, SAMPLING, param=None)[0]) == 4
