"""Qwen2.5-VL's own beside Qwen2-VL's: the seconds of a video's steps, and HF's processor on it."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import VideoMetadata

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.decoders.limits import MediaLimits
from mmjax.errors import RequestError, RequestValueError
from mmjax.parity.reference import make_pixels
from mmjax.processing.media.encoded import EncodedFrames, EncodedImage
from tests.families.glm4v import GLM4V
from tests.families.qwen2_5_omni import QWEN2_5_OMNI
from tests.families.qwen2_vl import IMAGE, QWEN2_5_VL, QWEN2_VL, VIDEO, hf_qwen2_5
from tests.families.qwen3_vl import QWEN3_VL
from tests.kit import draw


@pytest.fixture(scope="module")
def processor() -> Any:
    return QWEN2_5_VL.make_processor(
        processor_cache=MultiModalProcessorOnlyCache(2**26), enable_mm_embeds=True
    )


ONE_FRAME: dict[str, Any] = {"total_num_frames": 1}


class Stub(VideoProcessorMixin):
    """Stands for torchvision's video processor: grids and metadata alone, of 56x56 pixels."""

    merge_size = temporal_patch_size = 2
    model_input_names: Any = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, metadata: Sequence[dict[str, Any]]) -> None:
        self.metadata = metadata

    def __call__(self, videos: Any, **kwargs: Any) -> Any:
        grids = np.array([[-(-len(video) // 2), 4, 4] for video in videos])
        known = [VideoMetadata(**ONE_FRAME | one) for one in self.metadata]
        return {"video_grid_thw": grids, "video_metadata": known}


METADATA: list[dict[str, Any]] = [
    {},
    {"fps": 2.0},
    {"fps": 30.0, "total_num_frames": 90, "frames_indices": [0, 30, 60]},
]


def test_prompts_and_seconds_are_hfs(processor: Any):
    hf = hf_qwen2_5(Stub(METADATA))
    videos = [np.full((n, 56, 56, 3), 40 * n, np.uint8) for n in (1, 4, 3)]
    prompt = f"a {VIDEO}{IMAGE} b {VIDEO}\n{VIDEO}!"
    wanted = hf(text=prompt, images=[draw(90, 60)], videos=videos, return_tensors="np")
    given = [
        (frames, metadata) if metadata else frames
        for frames, metadata in zip(videos, METADATA, strict=True)
    ]
    for _ in range(2):  # cold and warm
        inputs = processor.apply(prompt, {"image": draw(90, 60), "video": given})
        assert inputs.prompt_token_ids == wanted["input_ids"][0].tolist()
        items = [item.get_data() for item in inputs.mm_kwargs["video"]]
        seconds = [item["second_per_grid_ts"] for item in items]
        assert all(one.dtype == np.float32 for one in seconds)
        np.testing.assert_allclose(seconds, wanted["second_per_grid_ts"], rtol=1e-7)
        np.testing.assert_allclose(seconds, [2 / 24, 1.0, 2.0], rtol=1e-7)
        image = make_pixels(inputs.mm_kwargs["image"][0].get_data())
        np.testing.assert_allclose(image["pixel_values"], wanted["pixel_values"], rtol=0, atol=1e-6)


def test_frames_at_another_speed_are_another_item(processor: Any):
    frames = np.zeros((2, 56, 56, 3), np.uint8)
    hashes = set()
    for metadata in (None, {"fps": 1.0}, {"fps": 4.0}):
        item = frames if metadata is None else (frames, metadata)
        inputs = processor.apply(VIDEO, {"video": [item]})
        hashes.add(inputs.mm_hashes["video"][0])
    assert len(hashes) == 3


@pytest.mark.parametrize(
    "metadata",
    [
        {"fps": 0},
        {"fps": -1.0},
        {"fps": float("nan")},
        {"fps": "fast"},
        {"fps": 1e-9},
        {"fps": 2.0, "frames_indices": [], "total_num_frames": 3},
        {"fps": 2.0, "frames_indices": [1], "total_num_frames": 0},
        {"fps": 2.0, "frames_indices": 5, "total_num_frames": 3},
    ],
)
def test_metadata_that_say_no_speed(processor: Any, metadata: dict[str, Any]):
    frames = np.zeros((2, 56, 56, 3), np.uint8)
    with pytest.raises(RequestError, match="metadata have `fps`") as caught:
        processor.apply(VIDEO, {"video": [(frames, metadata)]})
    assert caught.value.status == 400


@pytest.mark.parametrize("grid", [[1, 5, 8], [-1, -4, 4], [1, 0, 4], [0, 4, 4]])
def test_grids_that_no_tower_gives(processor: Any, grid: list[int]):
    count = int(np.prod(grid)) // 4
    embeds = {"image_embeds": np.ones((count, 64), np.float32), "image_grid_thw": np.array([grid])}
    with pytest.raises(RequestError, match="do not divide into items: grids are") as caught:
        processor.apply(IMAGE, {"image": embeds})
    assert caught.value.status == 400


def test_embeddings_of_videos_may_bring_their_seconds(processor: Any):
    grids = np.array([[2, 4, 4], [1, 4, 8]])
    embeds = {"video_embeds": np.ones((16, 64), np.float32), "video_grid_thw": grids}
    hashes = set()
    for seconds in (None, [0.5, 2.0], [1.0, 2.0]):
        given = embeds if seconds is None else {**embeds, "second_per_grid_ts": np.array(seconds)}
        inputs = processor.apply(f"{VIDEO} {VIDEO}", {"video": given})
        items = [item.get_data() for item in inputs.mm_kwargs["video"]]
        found = [item.get("second_per_grid_ts") for item in items]
        assert found == ([None, None] if seconds is None else seconds)
        hashes.add(inputs.mm_hashes["video"][0])
    assert len(hashes) == 3
    given = {**embeds, "second_per_grid_ts": np.array([1.0, np.nan])}
    with pytest.raises(RequestError, match=r"`second_per_grid_ts` is .*; expected 0 to 1000"):
        processor.apply(f"{VIDEO} {VIDEO}", {"video": given})


# ---- speeds of frames, as qwen-vl-utils returns them ---------------------------------------------

FRAMES = [np.full((4, 56, 56, 3), value, np.uint8) for value in (10, 200)]


def find_seconds(processor: Any, videos: Any, kwargs: Any) -> list[float]:
    prompt = VIDEO * len(videos)
    found = []
    for _ in range(2):  # cold and warm
        inputs = processor.apply(prompt, {"video": videos}, hf_processor_mm_kwargs=kwargs)
        items = [item.get_data() for item in inputs.mm_kwargs["video"]]
        found.append([float(item["second_per_grid_ts"]) for item in items])
    assert found[0] == found[1]
    return found[0]


def encoded(frames: np.ndarray) -> EncodedFrames:
    files = []
    for frame in frames:
        file = BytesIO()
        Image.fromarray(frame).save(file, "PNG")
        files.append(EncodedImage(file.getvalue(), MediaLimits()))
    return EncodedFrames(files, MediaLimits())


@pytest.mark.parametrize("form", [lambda frames: frames, encoded], ids=["frames", "files"])
def test_each_video_is_as_fast_as_fps_says(processor: Any, form: Any):
    """Also where the cache has the other one: an item is named after its own speed."""
    one, other = map(form, FRAMES)
    for kwargs in ({}, {"do_sample_frames": False}):
        for videos in ([one, other], [other, one], [one, one]):
            asked = {**kwargs, "fps": [2.0, 4.0]}
            assert find_seconds(processor, videos, asked) == [1.0, 0.5]
        assert find_seconds(processor, [one, other], {**kwargs, "fps": 1}) == [2.0, 2.0]
        assert find_seconds(processor, [one, other], {"videos_kwargs": {"fps": [1]}}) == [2.0, 2.0]


def test_what_metadata_say_stands(processor: Any):
    known = [(FRAMES[0], {"fps": 8.0}), (FRAMES[1], {"total_num_frames": 8})]
    assert find_seconds(processor, known, {"fps": [2.0, 4.0]}) == [0.25, 0.5]
    assert find_seconds(processor, known, {"fps": 2}) == [0.25, 1.0]


@pytest.mark.parametrize("family", [QWEN2_VL, QWEN2_5_VL, QWEN2_5_OMNI, QWEN3_VL, GLM4V])
def test_kwargs_of_qwen_vl_utils_are_taken(family: Any):
    """Its `process_vision_info` returns them, also for pictures alone."""
    own = family.make_processor(mm_processor_kwargs={"do_sample_frames": False, "fps": [2.0]})
    info = own.info
    video, image = (info.find_placeholder_str(modality, 1) for modality in ("video", "image"))
    for asked in ({}, {"do_sample_frames": False, "fps": [2.0]}):
        inputs = own.apply(video, {"video": FRAMES[:1]}, hf_processor_mm_kwargs=asked)
        assert inputs.mm_placeholders["video"]
    empty = {"do_sample_frames": False, "fps": []}
    assert own.apply(image, {"image": draw(90, 60)}, hf_processor_mm_kwargs=empty)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"fps": [1.0, 2.0, 3.0]}, "`fps` has 3 numbers .* for 2 videos"),
        ({"fps": []}, "`fps` has 0 numbers"),
        ({"fps": ["fast"]}, "`fps` is 'fast'"),
        ({"fps": 0}, "`fps` is 0 .*positive"),
        ({"fps": 1e-9}, "`fps` is 1e-09 .*from 0.001 on"),
        ({"do_sample_frames": True, "fps": 1}, "`do_sample_frames` is True.*`media_io_kwargs`"),
        ({"do_sample_frames": 1}, "`do_sample_frames` is 1"),
    ],
)
def test_other_speeds_are_refused(processor: Any, kwargs: Any, message: str):
    with pytest.raises(RequestValueError, match=message):
        processor.apply(VIDEO * 2, {"video": FRAMES}, hf_processor_mm_kwargs=kwargs)
