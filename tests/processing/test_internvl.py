"""InternVL's own: the original layout, tiles of any shape, videos, kwargs."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.config.engine_config import MultiModalConfig
from mmjax.errors import CheckpointError, RequestError
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor
from mmjax.parity.reference import make_pixels
from mmjax.processing import ImageSize
from mmjax.processing.image_processors.tiling import choose_arrangement, list_arrangements
from tests.families import FAMILIES, internvl
from tests.families.family import call_with_videos
from tests.families.internvl import (
    CONFIG,
    VIDEO,
    cut_as_original,
    ids_as_original,
    make_original,
    normalize_as_original,
    original,
)
from tests.kit import draw, draw_video

ROOMY = MultiModalProcessorOnlyCache


FAMILY = FAMILIES["internvl original"]


@pytest.fixture(params=["uncached", "cached"])
def hf_layout(request: pytest.FixtureRequest) -> Any:
    return internvl.make_processor(
        processor_cache=ROOMY(2**26) if request.param == "cached" else None
    )


def check_soft_places(inputs: Any, modality: str, context_id: int = 998) -> None:
    places = [
        place
        for one in inputs.mm_placeholders[modality]
        for start, stop in one.extract_embeds_range()
        for place in range(start, stop + 1)
    ]
    ids = enumerate(inputs.prompt_token_ids)
    assert places == [place for place, token_id in ids if token_id == context_id]


PROMPTS = [
    "<image>\nwhat is this?",
    "<image>",
    "look <image> at",
    "a<image>\nb <image>!<image> ",
    "<image><image>",
    "x\n\n<image>\n\n  <image>the cat",
    "(<image>) <image>>",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_are_those_of_the_original(processor: Any, prompt: str):
    """Also where the marker's outer tokens join the words: the text is replaced then."""
    sizes = [(60, 60), (200, 90), (37, 211)]
    images = [draw(*sizes[i % 3], seed=i) for i in range(prompt.count("<image>"))]
    tiles = [cut_as_original(image, 1, 6) for image in images]
    wanted = ids_as_original(processor, prompt, [len(one) for one in tiles])
    for given_prompt in (prompt, processor.info.get_tokenizer().encode(prompt)):
        inputs = processor.apply(given_prompt, {"image": images})
        assert inputs.prompt_token_ids == wanted
        check_soft_places(inputs, "image")
        data = make_pixels(inputs.mm_kwargs.get_data())
        pixels = np.concatenate([normalize_as_original(one) for one in tiles])
        np.testing.assert_allclose(data["pixel_values_flat"], pixels, rtol=0, atol=1e-6)
        assert data["image_num_patches"].tolist() == [len(one) for one in tiles]
        assert data["image_token_id"].tolist() == 998


WORDS = st.sampled_from(["what", " ", "\n", "\n\n", "the car", "<", ">", "!", "  ", "ü", "\t"])


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.lists(WORDS, max_size=4).map("".join), min_size=2, max_size=3))
def test_any_words_around_pictures_give_the_originals_tokens(pieces: list[str]):
    prompt = "<image>".join(pieces)
    images = [draw(60, 60, seed=i) for i in range(len(pieces) - 1)]
    processor = make_shared()
    wanted = ids_as_original(processor, prompt, [1] * len(images))
    for given_prompt in (prompt, processor_ids(processor, prompt)):
        inputs = processor.apply(given_prompt, {"image": images})
        assert inputs.prompt_token_ids == wanted
        check_soft_places(inputs, "image")


@cache
def make_shared() -> Any:
    return make_original()


@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    fewest=st.integers(1, 6),
    more=st.integers(0, 12),
)
def test_arrangements_are_those_of_the_original_and_of_hf(
    width: int, height: int, fewest: int, more: int
):
    most = fewest + more
    chosen = choose_arrangement(ImageSize(width, height), list_arrangements(fewest, most), 56)
    image = Image.new("1", (1, 1)).resize((width, height))
    tiles = cut_as_original(image, fewest, most)
    assert chosen[0] * chosen[1] + (chosen != (1, 1)) == len(tiles)
    if fewest == 1:  # HF lists arrangements of as many tiles in another order
        assert chosen == get_optimal_tiled_canvas((height, width), (56, 56), 1, most)


@pytest.mark.parametrize(
    ("size", "num_tiles"),
    [
        ((56, 56), 1),
        ((57, 55), 1),
        ((112, 112), 4 + 1),  # 2x2 and 1x1 are as close: it fills more than half of the larger
        ((79, 79), 1),
        ((80, 80), 4 + 1),
        ((112, 56), 2 + 1),
        ((1, 1000), 6 + 1),
        ((1000, 1), 6 + 1),
        ((168, 112), 6 + 1),
    ],
)
def test_tiles_of_a_picture(processor: Any, size: tuple[int, int], num_tiles: int):
    inputs = processor.apply("<image>", {"image": draw(*size)})
    (placeholder,) = inputs.mm_placeholders["image"]
    assert placeholder.get_num_embeds() == 4 * num_tiles
    assert placeholder.length == 4 * num_tiles + 2


def num_tiles(processor: Any, kwargs: dict[str, Any], size: tuple[int, int] = (300, 100)) -> int:
    placeholder = processor.info.get_placeholder_str("image", 1)
    inputs = processor.apply(placeholder, {"image": draw(*size)}, hf_processor_mm_kwargs=kwargs)
    return inputs.mm_placeholders["image"][0].get_num_embeds() // 4


@pytest.mark.parametrize(
    ("kwargs", "number"),
    [
        ({}, 3 + 1),
        ({"max_dynamic_patch": 2}, 2 + 1),
        ({"max_dynamic_patch": 1}, 1),
        ({"min_dynamic_patch": 4}, 4 + 1),
        ({"min_dynamic_patch": 12, "max_dynamic_patch": 12}, 12 + 1),
        ({"dynamic_image_size": False}, 1),
        ({"images_kwargs": {"max_dynamic_patch": 2}}, 2 + 1),
    ],
)
def test_numbers_of_tiles_come_from_kwargs_and_config(
    processor: Any, kwargs: dict[str, Any], number: int
):
    assert num_tiles(processor, kwargs) == number
    flat = {**kwargs, **kwargs.get("images_kwargs", {})}
    flat.pop("images_kwargs", None)
    assert num_tiles(make_original(**flat), {}) == number


def test_a_checkpoint_without_thumbnails():
    assert num_tiles(make_original(use_thumbnail=False), {}) == 3


@pytest.mark.parametrize(
    ("kwargs", "number"),
    [
        ({}, 3 + 1),
        ({"max_patches": 2}, 2 + 1),
        ({"min_patches": 4}, 4 + 1),
        ({"crop_to_patches": False}, 1),
        ({"images_kwargs": {"max_patches": 1}}, 1),
    ],
)
def test_hfs_layout_takes_hfs_kwargs(hf_layout: Any, kwargs: dict[str, Any], number: int):
    assert num_tiles(hf_layout, kwargs) == number
    assert num_tiles(internvl.make_processor(mm_processor_kwargs=kwargs), {}) == number


@pytest.mark.parametrize("num_frames", [1, 2, 11])
@pytest.mark.parametrize("prompt", ["{}\nwhat?", "<IMG_CONTEXT> and\n{} or <IMG_CONTEXT>"])
def test_hfs_layout_writes_videos_as_hf_does(hf_layout: Any, num_frames: int, prompt: str):
    prompt = prompt.format(VIDEO)
    images = [draw(60 + 100 * i, 60, seed=i) for i in range(prompt.count("<IMG_CONTEXT>"))]
    video = draw_video(num_frames, 80, 60)
    hf = call_with_videos(internvl.load_hf_videos(), prompt, images, [(video, {})])
    for given_prompt in (prompt, processor_ids(hf_layout, prompt)):
        inputs = hf_layout.apply(given_prompt, {"video": [video], "image": images})
        assert inputs.prompt_token_ids == hf.input_ids
        (placeholder,) = inputs.mm_placeholders["video"]
        assert placeholder.get_num_embeds() == 4 * num_frames
        video_item = inputs.mm_kwargs["video"][0].get_data()
        assert video_item["pixel_values_videos"].shape == (num_frames, 3, 56, 56)
        assert video_item["video_num_patches"] == num_frames


def processor_ids(processor: Any, text: str) -> list[int]:
    return processor.info.get_tokenizer().encode(text)


@pytest.mark.parametrize("size", [(56, 56), (90, 30), (1, 1), (3, 200), (200, 3)])
def test_hfs_frames_are_resized_and_normalized_as_hf_does(hf_layout: Any, size: tuple[int, int]):
    video = draw_video(3, *size)
    inputs = hf_layout.apply(VIDEO, {"video": video})
    hf = call_with_videos(internvl.load_hf_videos(), VIDEO, [], [(video, {})])
    pixels = make_pixels(inputs.mm_kwargs["video"][0].get_data())["pixel_values_videos"]
    wanted = hf.tensors["pixel_values"]
    np.testing.assert_allclose(pixels, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("prompt", ["<video>", "<image> then <video>\n<video>", "a<video>b<image>"])
def test_the_original_layout_takes_videos(processor: Any, prompt: str):
    videos = [draw_video(1 + 2 * i, 90, 60 + i, i) for i in range(prompt.count("<video>"))]
    images = [draw(60, 60) for _ in range(prompt.count("<image>"))]
    for given_prompt in (prompt, processor_ids(processor, prompt)):
        inputs = processor.apply(given_prompt, {"video": videos, "image": images})
        places = inputs.mm_placeholders["video"]
        assert [one.get_num_embeds() for one in places] == [4 * len(one) for one in videos]
        tile = "<img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>"
        for one, video in zip(places, videos, strict=True):
            ids = inputs.prompt_token_ids[one.offset : one.offset + one.length]
            text = processor.info.get_tokenizer().decode(ids)
            assert text == "".join(f"Frame{i + 1}: {tile}" for i in range(len(video)))
        tiles = [Image.fromarray(frame).resize((56, 56)) for video in videos for frame in video]
        data = make_pixels(inputs.mm_kwargs.get_data())
        pixels = normalize_as_original(tiles)
        np.testing.assert_allclose(data["pixel_values_flat_video"], pixels, rtol=0, atol=1e-6)


def test_a_language_model_without_a_video_token_takes_pictures_alone():
    llama = {**CONFIG["llm_config"], "model_type": "llama"}
    path = Path(shutil.copytree(original(), Path(mkdtemp()) / "llama"))
    (path / "config.json").write_text(json.dumps({**CONFIG, "llm_config": llama}))
    processor = create_processor(load_model_config(str(path)))
    assert processor.info.supported_mm_limits == {"image": None}
    with pytest.raises(RequestError, match="Unsupported modality: video"):
        processor.apply("<video>", {"video": draw_video(1, 9, 9)})
    assert processor.apply("<image>", {"image": draw(9, 9)}).mm_placeholders["image"]


def test_a_checkpoint_whose_files_contradict_each_other():
    processor = internvl.make_processor()
    processor.info.get_hf_config().image_seq_length = 256
    with pytest.raises(CheckpointError, match=r"`image_seq_length` of config.json is 256.* give 4"):
        processor.info.get_hf_processor()
    processor = internvl.make_processor()
    processor.info.get_hf_config().vision_config.image_size = [56, 28]
    with pytest.raises(CheckpointError, match=r"`image_size` .* is \[56, 28\]; tiles are square"):
        processor.info.get_hf_processor()


@pytest.mark.parametrize("make", [make_original, internvl.make_processor])
def test_embeddings_stand_for_pictures_and_whole_frames(make: Any):
    allowed = MultiModalConfig(enable_mm_embeds=True)
    processor = make(mm=allowed) if make is make_original else make(enable_mm_embeds=True)
    image = processor.info.get_placeholder_str("image", 1)
    data = {"image": torch.ones(1, 12, 64), "video": [torch.ones(8, 64)]}
    inputs = processor.apply(f"{image} and {VIDEO}", data)
    check_counts = {"image": [12], "video": [8]}
    for modality, counts in check_counts.items():
        found = [one.get_num_embeds() for one in inputs.mm_placeholders[modality]]
        assert found == counts
        assert list(inputs.mm_kwargs[modality][0]) == [f"{modality}_embeds"]
    with pytest.raises(RequestError, match="video embeddings have 7 rows; a frame has 4"):
        processor.apply(VIDEO, {"video": [torch.ones(7, 64)]})
    for rows in (6, 32):
        with pytest.raises(RequestError, match=f"have {rows} rows; a tile has 4.* 28 rows at most"):
            processor.apply(image, {"image": {"image_embeds": torch.ones(rows, 64)}})
    with pytest.raises(RequestError, match="--enable-mm-embeds"):
        make().apply(image, {"image": torch.ones(1, 4, 64)})
