"""Qwen2-VL's own: videos, sizes and their kwargs, embeddings in dicts."""

import json
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.errors import CheckpointError, RequestError
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor
from mmjax.parity.reference import make_pixels
from mmjax.processing import MultiModalInputs
from mmjax.processing.image_processors.parts import load_video_settings
from mmjax.processing.image_processors.patches import VideoPatcher, find_grid
from tests.families import FAMILIES, qwen2_vl
from tests.families.family import call_with_videos
from tests.families.hf_videos import take_functions
from tests.families.qwen2_vl import IMAGE, VIDEO
from tests.kit import draw, draw_video

FAMILY = FAMILIES["qwen2_vl"]
load_hf = partial(qwen2_vl.load_hf_videos, qwen2_vl.hf_processor, qwen2_vl.path)


def video_item(inputs: MultiModalInputs, index: int = 0) -> dict[str, Any]:
    item = inputs.mm_kwargs["video"][index]
    assert item is not None
    return item.get_data()


def resize_as_hf(height: int, width: int, low: int = 3136, high: int = 50176) -> tuple[int, int]:
    """Qwen2VLVideoProcessor's `smart_resize`."""
    functions = take_functions("qwen2_vl", "smart_resize")
    return functions.smart_resize(height, width, min_pixels=low, max_pixels=high)


VIDEOS = [(1, 56, 56), (2, 90, 60), (3, 640, 480), (5, 30, 400), (4, 1, 1), (6, 400, 30)]


@pytest.mark.parametrize(("num_frames", "width", "height"), VIDEOS)
def test_a_videos_patches_are_hfs(processor: Any, num_frames: int, width: int, height: int):
    video, prompt = draw_video(num_frames, width, height), f"a{VIDEO}b"
    inputs = processor.apply(prompt, {"video": [video]})
    hf = call_with_videos(load_hf(), prompt, [], [(video, {})]).tensors
    wanted, (grid,) = hf["pixel_values_videos"], hf["video_grid_thw"].tolist()
    item = video_item(inputs)
    assert item["video_grid_thw"].tolist() == grid
    assert item["video_grid_thw"].dtype == np.int64
    assert item["pixel_values_videos"].shape == wanted.shape
    pixels = make_pixels(item)["pixel_values_videos"]
    np.testing.assert_allclose(pixels, wanted, rtol=0, atol=FAMILY.tensors["pixel_values"])
    (placeholder,) = inputs.mm_placeholders["video"]
    assert placeholder.length == placeholder.get_num_embeds() == math.prod(grid) // 4
    assert placeholder.is_embed is None


@pytest.mark.parametrize(("width", "height"), [(56, 56), (37, 211), (640, 480)])
@pytest.mark.parametrize("num_frames", [1, 2])
def test_a_still_video_is_its_picture(processor: Any, width: int, height: int, num_frames: int):
    picture = draw(width, height)
    still = np.stack([np.asarray(picture)] * num_frames)
    inputs = processor.apply(IMAGE + VIDEO, {"image": picture, "video": [still]})
    image = inputs.mm_kwargs["image"][0].get_data()
    video = video_item(inputs)
    np.testing.assert_array_equal(video["pixel_values_videos"], image["pixel_values"])
    np.testing.assert_array_equal(video["video_grid_thw"], image["image_grid_thw"])


def test_the_last_frame_fills_an_odd_video(processor: Any):
    odd = draw_video(3, 60, 60)
    even = np.concatenate([odd, odd[-1:]])
    one, other = (processor.apply(VIDEO, {"video": [video]}) for video in (odd, even))
    np.testing.assert_array_equal(
        video_item(one)["pixel_values_videos"], video_item(other)["pixel_values_videos"]
    )
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.mm_hashes != other.mm_hashes


@pytest.mark.parametrize(
    "prompt",
    [
        f"{VIDEO}what is this?",
        f"look {IMAGE} and {VIDEO}{VIDEO}\n{IMAGE}!",
        f"{VIDEO}ü{IMAGE}\n\n{IMAGE} {VIDEO}",
        f"{VIDEO} then {VIDEO} then {VIDEO}",
    ],
)
def test_prompts_of_videos_and_pictures_are_hfs(processor: Any, prompt: str):
    images = [draw(60 + 40 * i, 90, seed=i) for i in range(prompt.count(IMAGE))]
    videos = [draw_video(1 + 2 * i, 80, 70 + 30 * i, i) for i in range(prompt.count(VIDEO))]
    wanted = call_with_videos(load_hf(), prompt, images, [(video, {}) for video in videos])
    mm_data = {"image": images, "video": videos}
    for given in (prompt, processor.info.get_tokenizer().encode(prompt), prompt):
        inputs = processor.apply(given, mm_data)
        assert inputs.prompt_token_ids == wanted.input_ids
        for modality, pad_id in (("image", 998), ("video", 999)):
            places = [
                place
                for one in inputs.mm_placeholders.get(modality, [])
                for place in range(one.offset, one.offset + one.length)
            ]
            ids = enumerate(inputs.prompt_token_ids)
            assert places == [place for place, token_id in ids if token_id == pad_id]


def test_a_list_of_frames_is_one_video(processor: Any):
    frames = [Image.fromarray(frame) for frame in draw_video(20, 30, 40)]
    array = np.stack([np.asarray(frame) for frame in frames])
    one = processor.apply(VIDEO, {"video": frames})
    other = processor.apply(VIDEO, {"video": array[None]})
    assert one.mm_kwargs == other.mm_kwargs
    assert one.mm_placeholders == other.mm_placeholders


def test_published_sizes_give_the_published_maximum():
    """1280 patches of 28x28 at most, as the model's card advises: 1280 tokens a picture."""
    processor = qwen2_vl.make_processor(mm_processor_kwargs={"max_pixels": 1280 * 28 * 28})
    size = processor.info.get_largest_image()
    assert size.width * size.height == 1280 * 28 * 28
    assert size.width / size.height == 40 / 32
    assert processor.info.get_mm_max_tokens_per_item()["image"] == 1280
    largest_prime = qwen2_vl.make_processor(mm_processor_kwargs={"max_pixels": 1279 * 28 * 28})
    assert largest_prime.info.get_mm_max_tokens_per_item()["image"] == 1278  # 1279 x 1 is too long


@pytest.mark.parametrize(
    ("num_units", "expected"), [(64, (8, 8)), (199, (18, 11)), (17, (4, 4)), (13, (13, 1))]
)
def test_no_sliver_is_planned_for(num_units: int, expected: tuple[int, int]):
    assert find_grid(num_units) == expected


def num_image_tokens(processor: Any, kwargs: dict[str, Any]) -> int:
    inputs = processor.apply(IMAGE, {"image": draw(900, 700)}, hf_processor_mm_kwargs=kwargs)
    return inputs.mm_placeholders["image"][0].length


@pytest.mark.parametrize(
    ("kwargs", "low", "high"),
    [
        ({}, 3136, 50176),
        ({"max_pixels": 15680}, 3136, 15680),
        ({"size": {"longest_edge": 15680, "shortest_edge": 3200}}, 3200, 15680),
        ({"size": {"longest_edge": 15680}}, 3136, 15680),
        ({"images_kwargs": {"max_pixels": 15680}}, 3136, 15680),
        ({"images_kwargs": {"size": {"longest_edge": 15680}}}, 3136, 15680),
        ({"videos_kwargs": {"max_pixels": 15680}}, 3136, 50176),
        ({"max_pixels": 900_000}, 3136, 900_000),
        ({"min_pixels": 940_800, "max_pixels": 1_100_000}, 940_800, 1_100_000),
        ({"size": {"longest_edge": 900_000}, "max_pixels": 15680}, 3136, 15680),
    ],
)
def test_sizes_come_from_kwargs(processor: Any, kwargs: dict[str, Any], low: int, high: int):
    num_tokens = math.prod(resize_as_hf(700, 900, low, high)) // 784
    assert num_image_tokens(processor, kwargs) == num_tokens
    by_operator = qwen2_vl.make_processor(mm_processor_kwargs=kwargs)
    assert num_image_tokens(by_operator, {}) == num_tokens


def test_the_longest_sliver_of_all_is_taken(processor: Any):
    assert processor.apply(IMAGE, {"image": draw(200, 1)}).mm_placeholders["image"][0].length == 29


def test_marks_around_a_pad_are_the_templates_affair(processor: Any):
    inputs = processor.apply("a<|image_pad|>b", {"image": draw(56, 56)})
    assert inputs.mm_placeholders["image"][0].offset == 1


@pytest.mark.parametrize("is_cap_by_kwargs", [False, True])
def test_a_capped_video_shares_the_context_among_its_frames(is_cap_by_kwargs: bool):
    info = qwen2_vl.make_processor().info
    hf = info.get_hf_processor().video_processor.hf
    capped = VideoPatcher(
        hf,
        max_pixels_resized=10**8,
        settings={"cap_pixels_per_frame": not is_cap_by_kwargs, "max_video_tokens": 400},
    )
    kwargs = {"cap_pixels_per_frame": True} if is_cap_by_kwargs else {}
    for num_frames in (2, 20, 60):
        found = capped([draw_video(num_frames, 400, 300)], **kwargs)["video_grid_thw"][0]
        budget = int(400 * 784 * 0.9) * 2 // num_frames
        high = max(min(50176, budget), int(3136 * 1.05))
        rows, columns = resize_as_hf(300, 400, high=high)
        assert found.tolist() == [num_frames // 2, rows // 14, columns // 14]


def test_patches_of_another_size_than_the_towers_are_the_checkpoints_fault():
    processor = qwen2_vl.make_processor()
    info = processor.info
    info.get_hf_config().vision_config.patch_size = 16
    with pytest.raises(CheckpointError, match=r"image_processor is 14, .* has 16"):
        info.get_hf_processor()


def test_fields_of_pictures_and_videos(processor: Any):
    inputs = processor.apply(IMAGE + VIDEO, {"image": draw(60, 60), "video": draw_video(2, 60, 60)})
    fields = {
        key: (type(elem.field).__name__, elem.field.keep_on_cpu)
        for items in inputs.mm_kwargs.values()
        for item in items
        if item is not None
        for key, elem in item.items()
    }
    assert fields == {
        "pixel_values": ("MultiModalFlatField", False),
        "image_affine": ("MultiModalSharedField", False),
        "image_grid_thw": ("MultiModalBatchedField", True),
        "pixel_values_videos": ("MultiModalFlatField", False),
        "video_affine": ("MultiModalSharedField", False),
        "video_grid_thw": ("MultiModalBatchedField", True),
    }


def make_embeds(modality: str, grids: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    num_embeds = sum(math.prod(grid) // 4 for grid in grids)
    values = np.random.default_rng(0).normal(size=(num_embeds, 64)).astype(np.float32)
    return {f"{modality}_embeds": values, f"{modality}_grid_thw": np.array(grids)}


@pytest.mark.parametrize(("modality", "marker"), [("image", IMAGE), ("video", VIDEO)])
def test_embeddings_come_with_their_grids(modality: str, marker: str):
    grids = [(1, 4, 6), (2, 2, 8)] if modality == "video" else [(1, 4, 6), (1, 2, 8)]
    embeds = make_embeds(modality, grids)
    for cache in (None, MultiModalProcessorOnlyCache(2**24)):
        processor = qwen2_vl.make_processor(processor_cache=cache, enable_mm_embeds=True)
        inputs = processor.apply(f"a{marker}b{marker}", {modality: embeds})
        lengths = [math.prod(grid) // 4 for grid in grids]
        assert [one.length for one in inputs.mm_placeholders[modality]] == lengths
        items = inputs.mm_kwargs[modality]
        for item, grid, length in zip(items, grids, lengths, strict=True):
            assert item is not None
            assert item[f"{modality}_embeds"].data.shape == (length, 64)
            assert item[f"{modality}_grid_thw"].data.tolist() == list(grid)


def test_what_is_written_into_embeddings_later_changes_no_cached_item():
    cache = MultiModalProcessorOnlyCache(2**20)
    processor = qwen2_vl.make_processor(processor_cache=cache, enable_mm_embeds=True)
    given = make_embeds("image", [(1, 4, 4)])
    processor.apply(IMAGE, {"image": given})
    given["image_embeds"][:] = 0
    again = processor.apply(IMAGE, {"image": make_embeds("image", [(1, 4, 4)])})
    assert cache.make_stats().hits == 1
    item = again.mm_kwargs["image"][0]
    assert item is not None
    assert item["image_embeds"].data.all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make_embeds("image", [(1, 4, 4)]), "You must set `--enable-mm-embeds`"),
        ({"image_embeds": np.zeros((4, 64), np.float32)}, "should contain the fields"),
        ({"image_embeds": np.zeros((4, 8)), "image_grid_thw": np.ones((1, 3))}, "dimension"),
        (
            {**make_embeds("image", [(1, 4, 4)]), "image_grid_thw": np.array([[1, 2, 2]])},
            "`image_embeds` has 4 rows, its items have 1",
        ),
        ({**make_embeds("image", [(1, 4, 4)]), "image_grid_thw": [1]}, "do not divide into items"),
        (torch.zeros(1, 4, 64), "embeddings must come with their grids"),
    ],
)
def test_embeddings_that_no_grid_fits(data: Any, message: str):
    is_allowed = "--enable" not in message
    processor = qwen2_vl.make_processor(enable_mm_embeds=is_allowed)
    with pytest.raises(RequestError, match=message) as caught:
        processor.apply(IMAGE, {"image": data})
    assert caught.value.status == 400


def copy_checkpoint(path: Path, files: dict[str, Any]) -> Any:
    """Return the processor of the tiny checkpoint with other processor files."""
    copied = Path(shutil.copytree(qwen2_vl.PATH, path / "checkpoint"))
    (copied / "processor_config.json").unlink()
    for name, content in files.items():
        (copied / name).write_text(json.dumps(content))
    return create_processor(load_model_config(str(copied)))


PUBLISHED = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": OPENAI_CLIP_MEAN,
    "image_std": OPENAI_CLIP_STD,
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
}


def test_processor_files_of_the_published_checkpoints(tmp_path: Path):
    """One file for pictures and videos alike, or one for each."""
    info = copy_checkpoint(tmp_path / "one", {"preprocessor_config.json": PUBLISHED}).info
    assert info.get_mm_max_tokens_per_item(32768) == {"image": 16384, "video": 32768}
    files = {
        "preprocessor_config.json": PUBLISHED,
        "video_preprocessor_config.json": {**PUBLISHED, "max_pixels": 602112},
    }
    info = copy_checkpoint(tmp_path / "two", files).info
    assert info.get_mm_max_tokens_per_item(32768) == {"image": 16384, "video": 768 * 7}
    info = copy_checkpoint(
        tmp_path / "silent", {**files, "video_preprocessor_config.json": {}}
    ).info
    patcher = info.get_hf_processor().video_processor
    assert patcher.get_pixel_limits({}) == (128 * 28 * 28, 768 * 28 * 28)
    (tmp_path / "silent" / "checkpoint" / "video_preprocessor_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"`video_preprocessor_config.json` is not JSON"):
        load_video_settings(tmp_path / "silent" / "checkpoint")
