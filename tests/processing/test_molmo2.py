"""Molmo 2's crops and points: where its own rules end, and what it refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.video_utils import VideoMetadata

from mmjax.errors import CheckpointError, RequestError, RequestValueError
from mmjax.models.molmo2.image_processor import (
    Molmo2ImageProcessor,
    Molmo2Sampling,
    pool_grid,
    resize_bilinear,
)
from mmjax.models.registry import create_processor
from tests.families.directories import edit_json
from tests.families.family import call_with_videos
from tests.families.hf_videos import take_functions
from tests.families.molmo2 import (
    MOLMO2,
    HFWithVideos,
    call_hf,
    cut,
    make_cutter,
    make_frames,
    only,
    write_files,
)
from tests.kit import draw, draw_video

SIZES = [(37, 211), (90, 70), (300, 40), (14, 14), (500, 500), (84, 126), (3, 400)]


@pytest.fixture(scope="module")
def processor() -> Any:
    return MOLMO2.make_processor()


@pytest.mark.parametrize("max_crops", [1, 3, 7])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pixels_windows_and_grids_are_hfs(width: int, height: int, max_crops: int):
    picture = draw(width, height, 5)
    found = only(make_cutter()([picture], max_crops=max_crops))
    expected = cut([picture], max_crops)
    steps = found["pixel_values"] - (expected["pixel_values"].double() * 127.5 + 127.5).numpy()
    assert np.abs(steps).max() < 1.01, "halves are rounded up or down"
    assert (np.abs(steps) > 0.01).mean() < 0.01
    np.testing.assert_array_equal(found["image_token_pooling"], expected["image_token_pooling"])
    np.testing.assert_array_equal([found["image_grids"]], expected["image_grids"])


@pytest.mark.parametrize(("width", "height"), [(640, 480), (91, 1200), (378, 378), (757, 333)])
def test_bytes_are_torchs_where_they_are_no_halves(width: int, height: int):
    """Of a half, torch's own byte depends on how many threads it has."""
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    for size in ((378, 378), (644, 910)):
        floats = torch.nn.functional.interpolate(planes, size, mode="bilinear")
        expected = floats[0].permute(1, 2, 0).numpy()
        differs = resize_bilinear(pixels, *size) != np.rint(expected)
        assert differs.mean() < 1e-4
        assert np.abs(expected[differs] % 1 - 0.5).max(initial=0) < 1e-4


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_token_ids_are_hfs(processor: Any, width: int, height: int):
    text, images = "<|image|>what is it", [draw(width, height, 1)]
    for prompt in (text, f"</s>{text}"):
        inputs = processor.apply(prompt, {"image": images})
        assert inputs.prompt_token_ids == call_hf(prompt, images, {}).input_ids
    (place,) = inputs.mm_placeholders["image"]
    assert place.get_longest_run() == place.length, "marks are seen with the image"


def test_windows_at_an_edge_lack_patches():
    windows, grid = pool_grid(np.arange(9).reshape(3, 3), 2, 2)
    assert grid == (2, 2)
    assert windows.tolist() == [[0, 1, 3, 4], [2, -1, 5, -1], [6, 7, -1, -1], [8, -1, -1, -1]]


def test_the_largest_published_image():
    size, most = Molmo2ImageProcessor().find_largest({})
    (rows,) = Molmo2ImageProcessor()([draw(*size)])["image_rows"]
    assert most == len(rows)


def test_an_answer_is_parsed_by_the_image_as_it_was_sent(processor: Any):
    inputs = processor.prepare("<|image|>point", {"image": [draw(200, 100)]})
    ids = processor.info.get_tokenizer().encode('<points coords="1 1 500 500">a</points>')
    assert inputs.parse_answer(ids)["points"]["points"] == [[100.0, 50.0]]
    assert processor.prepare("point", {}).parse_answer is None


@pytest.mark.parametrize("asked", [{}, {"num_frames": 7}, {"num_frames": 30}, {"fps": 0.7}])
@pytest.mark.parametrize("fps", [0.5, 2.0, 2.5, 29.97])
@pytest.mark.parametrize("duration", [None, 1.7, 299.5])
def test_sampled_frames_are_hfs(asked: dict[str, Any], fps: float, duration: float | None):
    hf = take_functions("molmo2", "sample_frames").sample_frames
    for total in (1, 2, 9, 47, 64, 65, 333, 5000):
        metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=duration)
        wanted = hf(SimpleNamespace(num_frames=64, max_fps=2), metadata, **asked).numpy()
        known = {"fps": fps, "duration": duration}
        found, _ = Molmo2Sampling().asked(asked).select(np.arange(total), known)
        # Its rounding may give a place behind the last frame, at which HF fails.
        np.testing.assert_array_equal(found, wanted[wanted < total])


@pytest.mark.parametrize("known", [{}, {"fps": 5.0}, {"fps": 5.0, "frames_indices": [0, 9, 70]}])
def test_seconds_are_hfs(processor: Any, known: dict[str, Any]):
    """Also of frames of which nobody says the speed: two a second."""
    if "frames_indices" in known:
        known = {**known, "total_num_frames": 99}
    video = (draw_video(3, 60, 60), known)
    inputs = processor.apply("<|video|>what", {"video": [video]})
    assert (
        inputs.prompt_token_ids
        == call_with_videos(HFWithVideos(), "<|video|>what", [], [video]).input_ids
    )
    (place,) = inputs.mm_placeholders["video"]
    # Of so few frames at five a second one is seen.
    frames = 1 if known == {"fps": 5.0} else 3
    assert place.get_num_embeds() == frames * make_frames().num_frame_tokens


def test_a_second_video_is_refused(processor: Any):
    with pytest.raises(RequestError, match="video"):
        processor.apply("<|video|><|video|>", {"video": [draw_video(3, 60, 60)] * 2})


@pytest.mark.parametrize("max_crops", [0, -1, True, "3", 1000])
def test_other_numbers_of_crops_are_refused(processor: Any, max_crops: Any):
    with pytest.raises(RequestValueError, match="max_crops"):
        processor.apply("<|image|>", {"image": [draw(20, 20)]}, {"max_crops": max_crops})


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("preprocessor_config", "size", {"height": 84, "width": 84}),
        ("preprocessor_config", "patch_size", 7),
        ("preprocessor_config", "patch_size", None),  # 14, which the tiny model's is not
        ("preprocessor_config", "resample", 3),
        ("preprocessor_config", "pooling_size", [4, 4]),
        ("video_preprocessor_config", "pooling_size", [4, 4]),
        ("video_preprocessor_config", "patch_size", 7),
        ("config", "frame_start_token_id", 3),
        ("preprocessor_config", "overlap_margins", [3, 2]),
        ("config", "image_patch_id", 3),
        ("config", "vision_config.num_position_embeddings", 24),
    ],
)
def test_files_that_contradict_each_other_are_refused(
    tmp_path: Path, file: str, key: str, value: Any
):
    path = write_files(tmp_path / "checkpoint")
    edit_json(path / f"{file}.json", {key: value})
    tokens = {"image_patch_id": "<im_patch>", "frame_start_token_id": "<frame_start>"}
    name = tokens.get(key, key.rpartition(".")[2])
    with pytest.raises(CheckpointError, match=name):
        create_processor(str(path)).apply("<|image|>", {"image": [draw(20, 20)]})
