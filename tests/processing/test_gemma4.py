"""Gemma 4's own: videos as HF's processor writes them, budgets of images, models that hear none."""

from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    get_aspect_ratio_preserving_size,
)

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.errors import CheckpointError, RequestError
from mmjax.parity.reference import make_pixels
from mmjax.processing.image_processors.token_budget import BUDGETS
from mmjax.processing.items.items import ImageSize
from tests.families.directories import edit_json, golden_processor
from tests.families.family import Family
from tests.families.gemma4 import GEMMA4, GEMMA4_UNIFIED, load_hf_videos
from tests.kit import draw

VIDEO = "<|video|>"


@pytest.fixture(scope="module")
def processor() -> Any:
    return GEMMA4.make_processor(processor_cache=MultiModalProcessorOnlyCache(2**26))


METADATA: list[dict[str, Any]] = [
    {},
    {"fps": 2.0},
    {"fps": 0.5, "total_num_frames": 300, "frames_indices": [0, 31, 299]},
]


def test_prompts_places_and_pixels_of_videos_are_hfs(processor: Any):
    hf = load_hf_videos()
    rng = np.random.default_rng(3)
    sizes = ((9, 40, 60), (5, 90, 31), (3, 64, 64))
    videos = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    prompt = f"a {VIDEO}<|image|> b{VIDEO}\n\n{VIDEO}!"
    wanted = hf(
        text=prompt,
        images=[[draw(90, 60)]],
        videos=videos,
        video_metadata=METADATA,
        return_tensors="np",
    )
    given = [
        (frames, metadata) if metadata else frames
        for frames, metadata in zip(videos, METADATA, strict=True)
    ]
    for _ in range(2):  # cold and warm
        inputs = processor.apply(prompt, {"image": draw(90, 60), "video": given})
        assert inputs.prompt_token_ids == wanted["input_ids"][0].tolist()
        text = processor.info.get_tokenizer().decode(inputs.prompt_token_ids)
        assert " 01:02 <|image>" in text
        assert " 09:58 <|image>" in text
        items = [item.get_data() for item in inputs.mm_kwargs["video"]]
        assert [len(item["timestamps"]) for item in items] == [4, 4, 3]
        for name in ("pixel_values_videos", "video_position_ids"):
            found = [make_pixels(item, colours_last=True)[name] for item in items]
            np.testing.assert_allclose(np.concatenate(found), wanted[name], rtol=0, atol=1e-6)


def test_a_video_of_fewer_frames_than_are_sampled_is_seen_whole(processor: Any):
    frames = np.zeros((2, 48, 48, 3), np.uint8)
    (item,) = processor.apply(VIDEO, {"video": [(frames, {"fps": 1.0})]}).mm_kwargs["video"]
    assert item.get_data()["timestamps"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("kwargs", [{"fps": 2}, {"num_frames": 3}, {"do_sample_frames": False}])
def test_a_request_says_how_many_frames_are_seen(processor: Any, kwargs: dict[str, Any]):
    frames = np.zeros((12, 48, 48, 3), np.uint8)
    data = {"video": [(frames, {"fps": 6.0})]}
    (item,) = processor.apply(VIDEO, data, hf_processor_mm_kwargs=kwargs).mm_kwargs["video"]
    places = {"fps": [0, 3, 6, 9], "num_frames": [0, 4, 8]}.get(next(iter(kwargs)), range(12))
    assert item.get_data()["timestamps"].tolist() == [place / 6 for place in places]


@pytest.mark.parametrize("budget", BUDGETS)
def test_images_are_resized_as_hf_resizes_them(processor: Any, budget: int):
    patcher = processor.info.get_hf_processor().image_processor
    for width, height in ((1, 1), (640, 480), (37, 211), (3, 999), (4000, 2), (4000, 3000)):
        expected = get_aspect_ratio_preserving_size(height, width, 4, 9 * budget, 3)
        found = patcher.find_size(ImageSize(width=width, height=height), budget)
        assert (found.height, found.width) == expected
    largest = patcher.find_largest(budget)
    assert patcher.find_size(largest, budget) == largest
    assert largest.width * largest.height == budget * 12**2


def test_a_model_without_a_tower_for_clips_hears_none(tmp_path: Path):
    path = Path(copytree(GEMMA4.path(), tmp_path / "deaf"))
    edit_json(path / "config.json", {"audio_config": None})
    deaf = golden_processor("deaf", path=path)
    assert deaf.info.get_mm_max_tokens_per_item(4096).keys() == {"image", "video"}
    for prompt in ("hear <|audio|>", [deaf.info.get_hf_config().audio_token_id]):
        with pytest.raises(RequestError, match="mark of a clip, and this model hears none"):
            deaf.apply(prompt, {})
    with pytest.raises(RequestError, match="audio; this model takes `image`, `video`"):
        deaf.apply("hear", {"audio": [np.zeros(100)]})


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        (GEMMA4, {"dither": 0.1}, "`dither` of the feature extractor is 0.1: noise"),
        (GEMMA4, {"feature_size": 9}, "is 9, but `subsampling_conv_channels` takes 8"),
        (GEMMA4, {"sampling_rate": 8_000}, "is 8000, but mmjax takes 16000"),
        (GEMMA4_UNIFIED, {"audio_samples_per_token": 1}, "is 1, but `audio_embed_dim` takes 640"),
        (GEMMA4_UNIFIED, {"sampling_rate": 8_000}, "is 8000, but mmjax takes 16000"),
    ],
)
def test_what_is_made_of_clips_otherwise_is_refused(
    family: Family, settings: dict[str, Any], words: str, tmp_path: Path
):
    path = Path(copytree(family.path(), tmp_path / "other"))
    edits = {f"feature_extractor.{name}": value for name, value in settings.items()}
    edit_json(path / "processor_config.json", edits)
    with pytest.raises(CheckpointError, match=words):
        golden_processor("other", path=path).info.get_hf_processor()


def test_a_clip_has_no_more_embeddings_than_the_longest(processor: Any):
    info = processor.info
    info.check_num_embeds("audio", info.max_clip_rows)
    for number, words in ((info.max_clip_rows + 1, "a clip has 25 at most"), (0, "no rows")):
        with pytest.raises(RequestError, match=words):
            info.check_num_embeds("audio", number)


def test_what_is_refused(processor: Any):
    image = {"image": draw(40, 40)}
    with pytest.raises(RequestError, match="one of 70, 140, 280, 560, 1120"):
        processor.apply("<|image|>", image, hf_processor_mm_kwargs={"max_soft_tokens": 71})
    frames = (np.zeros((3, 48, 48, 3), np.uint8), {"frames_indices": [0], "total_num_frames": 9})
    with pytest.raises(RequestError, match="frames_indices"):
        processor.apply(VIDEO, {"video": [frames]})


def test_every_video_that_is_sampled_is_planned_for_whatever_a_step_holds():
    """32 frames of 70: a step of 2,048 tokens would have had room for 29."""
    processor = GEMMA4.make_processor(mm_processor_kwargs={"num_frames": 32})
    for seq_len in (16, 2048, 4096):
        declared = processor.info.get_mm_max_tokens_per_item(seq_len, {"video": 1})
        assert declared["video"] == 32 * 70
    assert processor.info.get_mm_max_tokens_per_item(4096, {"video": 2})["video"] == 29 * 70
