"""Laws of videos, over every family whose row takes them: prompts and pixels, and whole answers.

HF's video processors need torchvision; `tests/families/hf_videos.py` has their rules without it.
HF's model is asked with what our processor made, which the first laws hold against HF's.
"""

from typing import Any

import numpy as np
import pytest
import torch

from mmjax import LLM, SamplingParams
from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.models.model_source import load_model_config
from mmjax.parity.case import Case, Parity
from mmjax.parity.compare import TOLERANCE
from mmjax.parity.reference import make_pixels
from tests.families import FAMILIES
from tests.families.default_run import mark
from tests.families.family import Family, call_with_videos
from tests.families.hf_videos import HFVideos
from tests.kit import draw, draw_video

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TAKEN = {name: family for name, family in FAMILIES.items() if family.video}
HELD = {name: family for name, family in TAKEN.items() if family.load_hf_videos is not None}
WITH_HFS = [pytest.param(family, id=name) for name, family in HELD.items()]
ASKED = [
    pytest.param(family, id=name, marks=mark("HF's tokens of videos", name))
    for name, family in TAKEN.items()
    if family.is_hf_asked
]
VIDEOS: dict[str, tuple[np.ndarray, dict[str, Any]]] = {
    "sampled": (
        draw_video(5, 90, 60),
        {"fps": 5.0, "total_num_frames": 500, "frames_indices": [3, 31, 64, 300, 499]},
    ),
    "few": (
        draw_video(3, 90, 60),
        {"fps": 5.0, "total_num_frames": 500, "frames_indices": [3, 31, 499]},
    ),
    "whole": (draw_video(7, 40, 130), {"fps": 2.0, "duration": 3.5}),
    "slow": (draw_video(5, 70, 50), {"fps": 0.25}),
}


def test_every_family_that_takes_videos_is_under_the_laws():
    takes = {
        name
        for name, family in FAMILIES.items()
        if "video" in family.make_processor().info.supported_mm_limits
    }
    assert takes == TAKEN.keys()
    # No class of HF's, or its processor's squares need torchvision.
    assert takes - HELD.keys() == {"gemma4_unified", "internvl original"}


SQUARE = (56, 56)
RESIZED = [
    *((size, SQUARE) for size in (SQUARE, (90, 30), (1, 1), (3, 200), (200, 3))),
    ((90, 60), (56, 84)),
    ((640, 480), (168, 252)),
    ((400, 30), (28, 392)),
]


@pytest.mark.parametrize(("size", "wanted"), RESIZED)
def test_pillow_resizes_frames_as_torch_does(size: tuple[int, int], wanted: tuple[int, int]):
    """Within two steps of a byte: torchvision, HF's, resizes with torch's own function."""
    video = draw_video(3, *size)
    frames = torch.from_numpy(video).permute(0, 3, 1, 2)
    by_torch = torch.nn.functional.interpolate(frames, wanted, mode="bicubic", antialias=True)
    videos = HFVideos(None, None, dict, normalized=((0.0,) * 3, (1.0,) * 3))
    difference = videos.resize(video, wanted) - by_torch.float() / 255
    assert difference.abs().max() < 2 / 255


@pytest.mark.parametrize("kind", VIDEOS)
@pytest.mark.parametrize("family", WITH_HFS)
def test_prompts_and_pixels_of_videos_are_hfs(family: Family, kind: str):
    """From text and from token ids, with a cold cache and a warm one."""
    assert family.load_hf_videos is not None
    prompt, video = f"look {family.video}\nwhat is it?", VIDEOS[kind]
    hf = call_with_videos(family.load_hf_videos(), prompt, [], [video])
    processor = family.make_processor(processor_cache=MultiModalProcessorOnlyCache(2**26))
    token_ids = processor.info.get_tokenizer().encode(prompt)
    for given in (prompt, prompt, token_ids):
        ours = processor.apply(given, {"video": [video]})
        assert ours.prompt_token_ids == hf.input_ids
        data = make_pixels(ours.mm_kwargs.get_data(), colours_last=family.colours_last)
        data = processor.info.reference_inputs(ours.prompt_token_ids, data)
        # HF's model may take a video's frames as pictures.
        name = family.video_pixels if family.video_pixels in data else "pixel_values"
        pixels = np.asarray(data[name])
        assert pixels.shape == np.shape(hf.tensors[family.video_pixels])
        most = family.tensors["pixel_values"]
        np.testing.assert_allclose(pixels, hf.tensors[family.video_pixels], rtol=0, atol=most)


@pytest.mark.parametrize("family", WITH_HFS)
def test_prompts_with_pictures_and_videos_are_hfs(family: Family):
    assert family.load_hf_videos is not None
    images, videos = [draw(90, 60), draw(50, 120, 1)], [VIDEOS["whole"]] * min(2, family.max_videos)
    prompt = f"{family.placeholder} a {family.video}\n\n{family.placeholder}?"
    prompt += f" {family.video}!" * (len(videos) - 1)
    hf = call_with_videos(family.load_hf_videos(), prompt, images, videos)
    processor = family.make_processor(processor_cache=MultiModalProcessorOnlyCache(2**26))
    for given in (prompt, processor.info.get_tokenizer().encode(prompt)):
        ours = processor.apply(given, {"image": images, "video": videos})
        assert ours.prompt_token_ids == hf.input_ids
        embedded = {
            *family.embed_token_ids(processor),
            *processor.info.get_embed_token_ids("video"),
        }
        places = sorted(
            place
            for ranges in ours.mm_placeholders.values()
            for one in ranges
            for first, last in one.extract_embeds_range()
            for place in range(first, last + 1)
        )
        assert places == [at for at, one in enumerate(hf.input_ids) if one in embedded]


OF_ONE_LENGTH = {"llava_onevision"}
"""Whose model in transformers takes the videos of a prompt as one array, padded to the longest."""
SETTLED = {"qwen3_omni"}
"""Whose tiny weights answer one token again and again; what they see is in states and logits."""


def write_cases(family: Family) -> list[Case]:
    """Return prompts of one video, of two, and of a picture and a video."""
    start = "here are the picture and some crops to help you see better how many red shapes "
    one, two = VIDEOS["few"], VIDEOS["slow"]
    if family.name in OF_ONE_LENGTH:
        frames, metadata = one
        two = (frames[::-1], metadata)
    cases = [
        Case(name="one", prompt=f"{start}{family.video} what is it", videos=[one]),
        Case(name="two", prompt=f"{start}{family.video}{family.video} which", videos=[one, two]),
        Case(
            name="both",
            prompt=f"{start}{family.placeholder} and {family.video} what color",
            images=[draw(90, 70)],
            videos=[two],
        ),
    ]
    return [case for case in cases if len(case.videos) <= family.max_videos]


@pytest.mark.parametrize("family", ASKED)
def test_states_logits_and_the_engines_tokens_are_hfs(family: Family):
    """HF's states and logits at every place; its tokens in chunks, cold, warm and all at once."""
    parity = Parity(load_model_config(str(family.checkpoint)), max_len=1024)
    assert family.tiny is not None
    family.tiny.mend(parity.reference)
    cases = write_cases(family)
    reports = [parity.run(case, max_tokens=NUM_TOKENS) for case in cases]
    for report in reports:
        assert report.is_within(TOLERANCE), (report.name, report.first_out_of(TOLERANCE))
    expected = [list(report.reference_token_ids) for report in reports]
    is_changed = len({str(answer) for answer in expected}) == len(cases)
    assert is_changed or family.name in SETTLED, "videos change nothing"
    prompts: list[Any] = [
        {
            "prompt": case.prompt,
            "multi_modal_data": {"video": list(case.videos), "image": list(case.images)},
        }
        for case in cases
    ]
    chunk = max(32, family.tiny.longest_run)
    settings = {**family.llm_settings, "max_num_batched_tokens": chunk}
    with LLM(family.checkpoint, use_tqdm_on_load=False, **settings) as llm:
        for _ in ("cold", "warm"):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [list(one.outputs[0].token_ids) for one in outputs] == expected
        assert llm.engine.stats().prefix_cache_hits > 0
        assert llm.engine.compilations == 0
