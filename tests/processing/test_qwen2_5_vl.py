"""Qwen2.5-VL's own beside Qwen2-VL's: the seconds of a video's steps, and HF's processor on it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import VideoMetadata

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.errors import RequestError
from mmjax.parity.reference import make_pixels
from tests.families.qwen2_vl import IMAGE, QWEN2_5_VL, VIDEO, hf_qwen2_5
from tests.kit import draw


@pytest.fixture(scope="module")
def processor() -> Any:
    return QWEN2_5_VL.make_processor(
        processor_cache=MultiModalProcessorOnlyCache(2**26), enable_mm_embeds=True
    )


class Stub(VideoProcessorMixin):
    """Stands for torchvision's video processor: grids and metadata alone, of 56x56 pixels."""

    merge_size = temporal_patch_size = 2
    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, metadata: Sequence[dict[str, Any]]) -> None:
        self.metadata = metadata

    def __call__(self, videos: Any, **kwargs: Any) -> Any:
        grids = np.array([[-(-len(video) // 2), 4, 4] for video in videos])
        known = [VideoMetadata(**{"total_num_frames": 1, **one}) for one in self.metadata]
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
