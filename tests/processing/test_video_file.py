"""Videos' files: the frames that are sampled of them, in the order in which they are shown."""

import io
import json
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mmjax.config.multimodal_config import MultiModalConfig
from mmjax.config.settings import settings_of
from mmjax.decoders.decode_workers import DecodeWorkers
from mmjax.decoders.limits import MediaLimits
from mmjax.decoders.video_file import (
    VideoHeader,
    VideoSampling,
    decode_frames,
    read_video_header,
)
from mmjax.decoders.worker import MAX_MESSAGE_BYTES
from mmjax.errors import ConfigError, MediaError, RequestValueError
from mmjax.processing.hashing.item_hashes import ItemHasher
from mmjax.processing.items.items import MultiModalDataItems, VideoProcessorItems
from mmjax.processing.media.encoded import EncodedFrames, EncodedImage, EncodedVideo

ALL = VideoSampling(-1, -1)
KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("mp4", "libx264", {"bf": "2"}),
    ("mov", "libx264", {"bf": "0"}),
    ("mp4", "mpeg4", {}),
    ("matroska", "libx264", {"bf": "3"}),
    ("webm", "libvpx", {}),
    ("webm", "libvpx-vp9", {}),
    ("avi", "mpeg4", {}),
    ("avi", "libx264", {"bf": "2"}),
]


NUM_BARS = 6


def draw_frame(place: int, size: tuple[int, int]) -> np.ndarray:
    """Return a frame with a dark or bright bar for each bit of its place."""
    bits = [place >> bar & 1 for bar in range(NUM_BARS)]
    columns = [bits[column * NUM_BARS // size[0]] for column in range(size[0])]
    bars = np.where(columns, 220, 30).astype(np.uint8)
    return np.broadcast_to(bars[None, :, None], (size[1], size[0], 3)).copy()


def write_video(
    num_frames: int = 40,
    size: tuple[int, int] = (64, 48),
    *,
    kind: str = "mp4",
    codec: str = "libx264",
    rate: int = 10,
    num_streams: int = 1,
    **options: str,
) -> bytes:
    """Return a file whose frames each tell their place."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        streams: list[Any] = []
        for _ in range(num_streams):
            stream: Any = container.add_stream(codec, rate=rate, options={"b": "1000k", **options})
            stream.width, stream.height = size
            stream.pix_fmt, stream.gop_size = "yuv420p", 8
            streams.append(stream)
        for place in range(num_frames):
            pixels = draw_frame(place, size)
            for stream in streams:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        for stream in streams:
            container.mux(stream.encode())
    return buffer.getvalue()


def places_of(frames: np.ndarray) -> list[int]:
    """Return which frames of `write_video` these are."""
    found = []
    for frame in frames:
        bars = np.array_split(frame[..., 1].mean(0), NUM_BARS)
        found.append(sum((bar[2:-2].mean() > 125) << number for number, bar in enumerate(bars)))
    return found


VIDEO = write_video()


@pytest.mark.parametrize(("kind", "codec", "options"), KINDS, ids=lambda value: str(value))
@pytest.mark.parametrize("sampling", [ALL, VideoSampling(), VideoSampling(3), VideoSampling(-1, 2)])
def test_every_sampled_frame_is_the_one_that_is_shown_then(
    kind: str, codec: str, options: dict[str, Any], sampling: VideoSampling, workers: DecodeWorkers
) -> None:
    data = write_video(kind=kind, codec=codec, **options)
    frames, header, indices = decode_frames(data, MediaLimits(), sampling)
    assert header[:4] == (64, 48, len(indices), 40)
    assert header.fps == pytest.approx(10)
    assert frames.shape == (len(indices), 48, 64, 3)
    assert places_of(frames) == indices == sampling.choose(40, 4.0)
    apart = workers.decode_frames(data, MediaLimits(), sampling, param=None)
    np.testing.assert_array_equal(apart[0], frames)
    assert apart[1:] == (header, indices)
    assert workers.read_video_header(data, MediaLimits(), sampling, param=None) == header
    assert read_video_header(data, MediaLimits(), sampling) == header


@pytest.mark.parametrize(
    ("sampling", "total", "seconds", "places"),
    [
        (VideoSampling(), 20, 2.0, list(range(20))),
        (VideoSampling(), 100, 4.0, np.linspace(0, 99, 32, dtype=int).tolist()),
        (VideoSampling(4), 10, 1.0, [0, 3, 6, 9]),
        (VideoSampling(1), 10, 1.0, [0]),
        (VideoSampling(-1), 3, 1.0, [0, 1, 2]),
        (VideoSampling(32, 1), 90, 3.0, [0, 44, 89]),
        (VideoSampling(2, 1), 90, 3.0, [0, 89]),
        (VideoSampling(-1, 0.5), 30, 1.0, [0]),
        (VideoSampling(-1, 1), 30, 0.0, [0]),
    ],
)
def test_frames_are_chosen_as_vllm_chooses_them(
    sampling: VideoSampling, total: int, seconds: float, places: list[int]
) -> None:
    assert sampling.choose(total, seconds) == places


def test_a_turned_video_is_upright() -> None:
    header = read_video_header(VIDEO, MediaLimits(), ALL)
    data = bytearray(VIDEO)
    place = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 4 + 4  # to the matrix of its track
    matrix = [0, 1, 0, -1, 0, 0, 0, 0, 16384]
    for number, value in enumerate(matrix):
        fixed = value if number == 8 else value * 65536
        fixed = 0x40000000 if number == 8 else fixed
        data[place + 4 * number : place + 4 * number + 4] = fixed.to_bytes(4, "big", signed=True)
    frames, turned, _ = decode_frames(bytes(data), MediaLimits(), VideoSampling(4))
    assert turned[:2] == header[:2] == (64, 48)
    assert frames.shape == (4, 64, 48, 3)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (MediaLimits(max_video_bytes=100), "encoded bytes, at most 100"),
        (MediaLimits(max_video_frames=31), "32 frames, at most 31"),
        (MediaLimits(max_image_pixels=3000), "64x48 = 3072 pixels, at most 3000"),
        (MediaLimits(max_video_pixels=50_000), "98304 pixels, at most 50000"),
    ],
)
def test_limits_hold_before_a_frame_is_decoded(
    limits: MediaLimits, message: str, workers: DecodeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr("mmjax.decoders.video_file._decode", refuse)
    for function in (decode_frames, read_video_header):
        with pytest.raises(RequestValueError, match=message):
            function(VIDEO, limits, VideoSampling(), param="here")
    for function in (workers.decode_frames, workers.read_video_header):
        with pytest.raises(RequestValueError, match=message) as caught:
            function(VIDEO, limits, VideoSampling(), param="here")
        assert caught.value.param == "here"


# ---- items --------------------------------------------------------------------------------------


def encoded(data: bytes = VIDEO, **options: Any) -> EncodedVideo:
    return EncodedVideo(data, MediaLimits(), "here", **options)


def frames_of(*images: Image.Image) -> EncodedFrames:
    files = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        files.append(EncodedImage(buffer.getvalue(), MediaLimits(), "here"))
    return EncodedFrames(files, MediaLimits(), "here")


def hash_of(*videos: Any) -> list[str]:
    items = MultiModalDataItems({"video": VideoProcessorItems(list(videos))})
    return ItemHasher("model").identify(items, {}, {}).by_modality["video"]


def test_an_encoded_video_is_an_item() -> None:
    video = encoded(sampling=VideoSampling(5))
    items = VideoProcessorItems([video], has_pairs=True)
    assert items.count_bytes_to_decode(0) == 5 * 64 * 48 * 4
    frames, metadata = items.get(0)
    assert places_of(frames) == [0, 9, 19, 29, 39]
    assert metadata["frames_indices"] == [0, 9, 19, 29, 39]
    assert (metadata["total_num_frames"], metadata["fps"]) == (40, 10.0)
    assert items.count_bytes_to_decode(0) == 0
    assert items.get_param(0) == "here"
    items.drop_decoded()
    assert items.count_bytes_to_decode(0) > 0
    (plain,) = VideoProcessorItems([encoded(sampling=VideoSampling(5))]).get_processor_data()[
        "videos"
    ]
    np.testing.assert_array_equal(plain, frames)


def test_what_is_asked_of_a_video_is_part_of_its_name() -> None:
    colors = [Image.new("RGB", (8, 6), color) for color in ("red", "green", "blue")]
    videos = [
        encoded(),
        encoded(sampling=VideoSampling(5)),
        encoded(sampling=VideoSampling(5, 1)),
        encoded(write_video(39)),
        frames_of(*colors),
        frames_of(*colors[:2]),
        frames_of(colors[1], colors[0], colors[2]),
    ]
    assert len(set(hash_of(*videos))) == len(videos)
    assert hash_of(encoded(), frames_of(*colors)) == hash_of(videos[0], videos[4])


def test_frames_are_a_video() -> None:
    colors = [Image.new("RGB", (8, 6), (shade, 0, 0)) for shade in (10, 20, 30)]
    items = VideoProcessorItems([frames_of(*colors)], has_pairs=True)
    assert items.count_bytes_to_decode(0) == 3 * 8 * 6 * 4
    assert items.get(0)[:, 0, 0, 0].tolist() == [10, 20, 30]
    with pytest.raises(RequestValueError, match="several sizes, 8x6, 9x6"):
        frames_of(colors[0], Image.new("RGB", (9, 6))).decode()


def test_a_file_that_is_no_video() -> None:
    with pytest.raises(MediaError) as caught:
        encoded(b"GIF89a" * 10, explain=lambda error: MediaError("told", param="x")).decode()
    assert str(caught.value) == "told"


def test_the_most_frames_that_may_be_allowed_fit_a_worker_s_message() -> None:
    settings = {one.name: one for one in settings_of(MultiModalConfig)}
    most, total = settings["max_video_frames"].maximum, 10**6
    assert most is not None
    sampling = VideoSampling(int(most), -1)
    header = VideoHeader(2**14, 2**14, int(most), total, 30000 / 1001)
    reply = {"header": header, "size": header[:2], "indices": sampling.choose(total, 0.0)}
    assert len(json.dumps(reply).encode()) <= MAX_MESSAGE_BYTES
    with pytest.raises(ConfigError, match="max_video_frames"):
        MultiModalConfig(max_video_frames=30_000)
