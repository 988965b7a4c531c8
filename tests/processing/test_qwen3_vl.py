"""Qwen3-VL's own beside Qwen2-VL's: frames sampled by time, their seconds as text, sizes by volume.

What HF's video processor decides by is taken out of its source, and is the reference.
"""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.video_utils import VideoMetadata

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.errors import RequestError
from mmjax.processing.encoder_budget import MultiModalProfiler
from mmjax.processing.items.items import ImageSize
from tests.families.hf_videos import take_functions
from tests.families.qwen2_vl import IMAGE, VIDEO
from tests.families.qwen3_vl import QWEN3_VL, VIDEO_SETTINGS, hf_processor, load_hf_videos
from tests.kit import draw

UNIT = 32
LIMITS: Mapping[str, int] = VIDEO_SETTINGS["size"]


HF = take_functions("qwen3_vl", "smart_resize", "sample_frames")
SAMPLING = SimpleNamespace(fps=2, num_frames=None, min_frames=4, max_frames=768)
"""Of HF's class, where a checkpoint says nothing."""


@pytest.fixture(scope="module")
def processor() -> Any:
    cache = MultiModalProcessorOnlyCache(2**26)
    return QWEN3_VL.make_processor(processor_cache=cache, enable_mm_embeds=True)


@pytest.fixture(scope="module")
def patcher(processor: Any) -> Any:
    return processor.info.get_hf_processor().video_processor


def draw_video(count: int, width: int, height: int) -> np.ndarray:
    generator = np.random.default_rng(count)
    return generator.integers(0, 256, (count, height, width, 3), np.uint8)


METADATA: list[dict[str, Any]] = [
    {},
    {"fps": 2.0},
    {"fps": 30.0, "total_num_frames": 90, "frames_indices": [0, 31, 64]},
    {"fps": 12.5},
]


def test_prompts_and_grids_of_videos_are_hfs(processor: Any):
    hf = load_hf_videos("qwen3_vl")
    sizes = [(6, 90, 60), (7, 70, 50), (3, 40, 130), (60, 33, 20)]
    videos = [draw_video(*size) for size in sizes]
    prompt = f"a {VIDEO}{IMAGE} b {VIDEO}\n{VIDEO}! {VIDEO}"
    wanted = hf(
        text=prompt,
        images=[draw(90, 60)],
        videos=videos,
        video_metadata=METADATA,
        return_tensors="np",
    )
    media = [
        (frames, metadata) if metadata else frames
        for frames, metadata in zip(videos, METADATA, strict=True)
    ]
    inputs = processor.apply(prompt, {"image": draw(90, 60), "video": media})
    items = [item.get_data() for item in inputs.mm_kwargs["video"]]
    for said in (inputs, processor.apply(prompt, {"image": draw(90, 60), "video": media})):
        assert said.prompt_token_ids == wanted["input_ids"][0].tolist()
        grids = [item.get_data()["video_grid_thw"].tolist() for item in said.mm_kwargs["video"]]
        assert grids == wanted["video_grid_thw"].tolist()
    assert len(items[3]["pixel_values_videos"]) == 5 * 2 * 4  # 9 of 60 frames
    np.testing.assert_allclose(items[1]["timestamps"], [0.25, 1.25, 2.25, 3.0])
    np.testing.assert_allclose(items[2]["timestamps"], [31 / 60, 64 / 30])
    places = inputs.mm_placeholders["video"]
    assert [place.get_num_embeds() for place in places] == [
        item["video_grid_thw"].prod() // 4 for item in items
    ]
    assert len(places[1].extract_embeds_range()) == 4


def test_pixels_are_pillows_of_the_frames_that_are_seen(patcher: Any):
    video = draw_video(24, 100, 70)
    out = patcher([(video, {"fps": 8.0})])
    assert out["video_grid_thw"].tolist() == [[3, 4, 6]]
    places = np.linspace(0, 23, 6).round().astype(int)
    frames = [
        np.asarray(Image.fromarray(video[place]).resize((96, 64), Image.Resampling.BICUBIC))
        for place in places
    ]
    patches = out["pixel_values_videos"].reshape(3, 2, 3, 2, 2, 3, 2, 16, 16)
    whole = patches.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(6, 64, 96, 3)
    np.testing.assert_array_equal(whole, frames)


@settings(deadline=None, max_examples=300)
@given(
    st.integers(2, 40),
    st.integers(1, 700),
    st.integers(1, 700),
    st.sampled_from([(4096, 150_000), (131_072, 786_432), (20_000, 20_480)]),
)
def test_sizes_are_hfs(count: int, width: int, height: int, limits: tuple[int, int]):
    patcher = QWEN3_VL.make_processor().info.get_hf_processor().video_processor
    bounds = dict(zip(("shortest_edge", "longest_edge"), limits, strict=True))
    given = ImageSize(width=width, height=height)
    try:
        wanted = HF.smart_resize(count, height, width, 2, UNIT, *limits)
    except ValueError:  # too long a side
        with pytest.raises(RequestError, match="at most 200 times"):
            patcher([draw_video(count, width, height)], size=bounds)
    else:
        size = patcher.find_size(given, count, bounds)
        assert (size.height, size.width) == wanted


@pytest.mark.parametrize("total", [1, 2, 3, 5, 9, 47, 48, 200, 5000])
@pytest.mark.parametrize("fps", [None, 1.0, 2.5, 24.0, 59.94])
@pytest.mark.parametrize("asked", [{}, {"fps": 1}, {"fps": 4.5}, {"num_frames": 7}])
def test_sampled_frames_are_hfs(patcher: Any, total: int, fps: float | None, asked: dict[str, Any]):
    metadata = VideoMetadata(total_num_frames=total, fps=fps)
    wanted = HF.sample_frames(SAMPLING, metadata, **asked) if total >= 7 or not asked else None
    frames = np.arange(total).reshape(-1, 1, 1, 1)
    sampling = patcher.sampling.asked(asked)
    found, timing = sampling.select(frames, {} if fps is None else {"fps": fps})
    seconds = patcher.find_seconds(timing)
    if wanted is not None:
        assert found.reshape(-1).tolist() == wanted.tolist()
        hf = hf_processor()._calculate_timestamps(wanted.tolist(), fps or 24, 2)
        np.testing.assert_array_equal(seconds, hf)
    assert len(seconds) == -(-len(found) // 2)


def test_one_frame_is_a_video_of_one_step(processor: Any):
    inputs = processor.apply(VIDEO, {"video": draw_video(1, 64, 64)})
    (item,) = [item.get_data() for item in inputs.mm_kwargs["video"]]
    assert item["video_grid_thw"].tolist() == [1, 4, 4]
    patches = item["pixel_values_videos"].reshape(16, 3, 2, -1)
    np.testing.assert_array_equal(patches[:, :, 0], patches[:, :, 1])


def test_frames_that_were_sampled_are_all_seen(patcher: Any):
    video = draw_video(30, 32, 32)
    whole = patcher([(video, {"fps": 10.0})])
    assert whole["video_grid_thw"].tolist() == [[3, 2, 2]]  # 6 of 30
    sampled = {"fps": 10.0, "total_num_frames": 300, "frames_indices": list(range(0, 300, 10))}
    assert patcher([(video, sampled)])["video_grid_thw"].tolist() == [[15, 2, 2]]
    kept = patcher([(video, {"fps": 10.0})], do_sample_frames=False)
    assert kept["video_grid_thw"].tolist() == [[15, 2, 2]]
    np.testing.assert_allclose(kept["timestamps"][:2], [0.05, 0.25])


def test_metadata_may_say_that_frames_were_sampled(patcher: Any):
    """As those of vLLM's `VideoAsset`, whose `total_num_frames` is that of the frames given."""
    video = draw_video(16, 40, 40)
    known = {"total_num_frames": 16, "fps": 30.0, "frames_indices": list(range(16))}
    for is_whole, wanted in ((False, 8), (True, 2)):
        metadata = {**known, "do_sample_frames": is_whole}
        assert patcher([(video, metadata)])["video_grid_thw"][0, 0] == wanted


def test_a_capped_video_shares_its_pixels_among_its_frames(patcher: Any):
    for count in (4, 9, 16):
        video = draw_video(count, 400, 300)
        out = patcher([video], do_sample_frames=False, cap_pixels_per_frame=True)
        share = max(min(768 * 1024, LIMITS["longest_edge"] // count), int(4096 * 1.05))
        size = HF.smart_resize(count, 300, 400, 2, UNIT, 4096, share * count)
        assert out["video_grid_thw"][0].tolist() == [-(-count // 2), size[0] // 16, size[1] // 16]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"fps": 0}, "`fps` is 0"),
        ({"fps": "fast"}, "`fps` is 'fast'"),
        ({"num_frames": -3}, "`num_frames` is -3"),
        ({"num_frames": 4, "fps": 1}, "`fps` and `num_frames` are both given"),
        ({"patch_size": 14}, "`patch_size` is 14"),
    ],
)
def test_kwargs_that_no_video_can_have(processor: Any, kwargs: dict[str, Any], match: str):
    with pytest.raises(RequestError, match=match) as caught:
        processor.apply(VIDEO, {"video": draw_video(9, 40, 40)}, hf_processor_mm_kwargs=kwargs)
    assert caught.value.status == 400


@pytest.mark.parametrize("places", [[1, 2], [0.5, 1.5, 2.5], ["a", "b", "c"]])
def test_metadata_of_other_frames_are_refused(processor: Any, places: Sequence[Any]):
    metadata = {"fps": 2.0, "total_num_frames": 90, "frames_indices": places}
    with pytest.raises(RequestError, match="`frames_indices`") as caught:
        processor.apply(VIDEO, {"video": [(draw_video(3, 40, 40), metadata)]})
    assert caught.value.status == 400


def test_embeddings_bring_the_features_for_the_first_layers(processor: Any):
    grids = np.array([[2, 4, 4], [1, 4, 8]])
    width = 32 * 3  # the decoder's, and the features of two blocks
    embeds = {"video_embeds": np.ones((16, width), np.float32), "video_grid_thw": grids}
    decode = processor.info.get_tokenizer().decode
    for seconds, texts in (
        (None, ("<0.0 seconds>", "<0.1 seconds>", "<0.0 seconds>")),
        ([1.5, 3.5, 0.25], ("<1.5 seconds>", "<3.5 seconds>", "<0.2 seconds>")),
    ):
        given = embeds if seconds is None else {**embeds, "timestamps": np.array(seconds)}
        inputs = processor.apply(f"{VIDEO} {VIDEO}", {"video": given})
        text = decode(inputs.prompt_token_ids)
        found = [part.split("<|vision_start|>")[0] for part in text.split("<")]
        assert [f"<{one}" for one in found if "seconds" in one] == list(texts)
        assert [place.get_num_embeds() for place in inputs.mm_placeholders["video"]] == [8, 8]
    narrow = {**embeds, "video_embeds": np.ones((16, 32), np.float32)}
    with pytest.raises(RequestError, match="got 32, the model has 96"):
        processor.apply(f"{VIDEO} {VIDEO}", {"video": narrow})
    late = {**embeds, "timestamps": np.array([1.0, np.nan, 2.0])}
    with pytest.raises(RequestError, match=r"`timestamps` are .*; expected seconds from 0 on"):
        processor.apply(f"{VIDEO} {VIDEO}", {"video": late})


@pytest.mark.parametrize("kwargs", [{}, {"cap_pixels_per_frame": True}, {"max_pixels": 31_000}])
@pytest.mark.parametrize("num_tokens", [60, 120, 448, 4096])
def test_the_largest_video_is_planned_for(kwargs: dict[str, Any], num_tokens: int):
    """Of all numbers of frames: HF rounds them, and five of them count as four."""
    processor = QWEN3_VL.make_processor(mm_processor_kwargs={"videos_kwargs": kwargs})
    patcher = processor.info.get_hf_processor().video_processor
    num_frames, grid = patcher.find_largest_video(kwargs, num_tokens)
    planned = -(-num_frames // 2) * math.prod(grid)
    found = []
    for count in (*range(1, 33), 767, 768):
        limits = patcher._limit(kwargs, count)
        for width, height in ((192, 192), (640, 480), (90, 200)):
            size = patcher.find_size(ImageSize(width=width, height=height), count, limits)
            found.append(-(-count // 2) * math.prod(size) // UNIT**2)
    assert max(number for number in found if number <= num_tokens) <= planned <= num_tokens
    assert patcher.find_largest_video({"max_pixels": 4_096_000}, 4096) == (5, (40, 25))
    if num_tokens == 4096:
        counts = {"image": 1, "video": 1}
        declared = processor.info.get_mm_max_tokens_per_item(32, counts)
        assert declared == {"image": 64, "video": planned}
        profiler = MultiModalProfiler(processor)
        assert profiler.measure_mm_max_tokens_per_item(32, counts) == declared
