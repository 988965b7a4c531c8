"""Laws of every family's items beside the images of `test_laws.py`: videos, and embeddings."""

from typing import Any

import numpy as np
import pytest

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.processing.encoder_budget import MultiModalProfiler
from tests.families import CLIP_FAMILIES, FAMILIES
from tests.families.default_run import NEAR, slow_unless
from tests.families.directories import get_placeholder_str
from tests.families.family import Family
from tests.kit import draw, draw_video
from tests.processing.conftest import both_kinds

OF_VIDEOS = [pytest.param(one, id=name) for name, one in FAMILIES.items() if one.video]
# Processors of rows near to others are made of the others' parts, which the default run asks.
DUMMIES = [
    pytest.param(
        family,
        kwargs,
        id=f"{name}-{'-'.join(kwargs) or 'plain'}",
        marks=slow_unless(name not in NEAR),
    )
    for name, family in FAMILIES.items()
    if family.video
    for kwargs in family.video_kwargs
]
OF_EMBEDS = [
    pytest.param(family, kwargs, id=f"{name}-{'-'.join(kwargs) or 'plain'}")
    for name, family in FAMILIES.items()
    if family.takes_embeds
    for kwargs in family.extra_kwargs
]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_stands_for_an_item_is_known_without_a_checkpoint(name: str):
    family = FAMILIES[name]
    marks = [get_placeholder_str(family.architecture, "image", n) for n in (1, 3)]
    numbered = [f"Picture {n}: {family.placeholder}" for n in (1, 3)]
    assert marks == (numbered if name == "qwen_vl" else [family.placeholder or None] * 2)
    assert get_placeholder_str(family.architecture, "video", 1) == (family.video or None)
    of_clips = {row.architecture: row.placeholder for row in CLIP_FAMILIES.values()}
    known = of_clips.get(family.architecture)
    assert get_placeholder_str(family.architecture, "audio", 1) == known


@pytest.mark.parametrize("family", OF_VIDEOS)
@pytest.mark.parametrize("capacity", [0, 150_000, 2**26])
def test_cold_warm_and_partly_warm_caches_agree_on_videos(family: Family, capacity: int):
    videos = [draw_video(1 + i, 60 + 20 * i, 50, i) for i in range(3)]
    several = [videos[0], videos[1], videos[0], videos[2]][: family.max_videos]
    mm_data = {"video": several, "image": [draw(60, 170)]}
    video, more = family.video, family.video * (len(several) > 1)
    prompt = f"a\n{video}{more}{family.placeholder}\n{more} {more}"
    wanted = family.make_processor().apply(prompt, mm_data)
    cache = MultiModalProcessorOnlyCache(capacity)
    processor = family.make_processor(processor_cache=cache)
    processor.apply(video, {"video": [videos[1]]})
    for _ in range(3):
        found = processor.apply(prompt, mm_data)
        assert found.prompt_token_ids == wanted.prompt_token_ids
        assert found.mm_placeholders == wanted.mm_placeholders
        assert found.mm_hashes == wanted.mm_hashes
        assert found.mm_kwargs == wanted.mm_kwargs


@pytest.mark.parametrize(
    "seq_len",
    [1, 4096, *(pytest.param(one, marks=pytest.mark.slow) for one in (10, 64, 200, 448))],
)
@pytest.mark.parametrize(
    ("num_images", "num_videos"),
    # Counts of both kinds are in (1, 3), of one kind in (2, 0).
    [(1, 3), (2, 0), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 1), (0, 3)))],
)
@pytest.mark.parametrize(("family", "kwargs"), DUMMIES)
def test_dummy_videos_have_exactly_the_declared_maximum(
    family: Family, kwargs: dict[str, Any], num_images: int, num_videos: int, seq_len: int
):
    processor = family.make_processor(mm_processor_kwargs=kwargs)
    numbers = {"image": num_images, "video": num_videos}
    counts = {modality: number for modality, number in numbers.items() if number}
    declared = processor.info.get_mm_max_tokens_per_item(seq_len, counts)
    measured = MultiModalProfiler(processor).measure_mm_max_tokens_per_item(seq_len, counts)
    assert measured == {modality: declared[modality] for modality in counts}


@pytest.mark.parametrize(("family", "kwargs"), OF_EMBEDS)
@pytest.mark.parametrize("has_cache", [False, True])
def test_embeddings_stand_where_their_picture_would(
    family: Family, kwargs: dict[str, Any], has_cache: bool
):
    cache = MultiModalProcessorOnlyCache(2**24) if has_cache else None  # of one operator's settings
    processor = family.make_processor(
        processor_cache=cache, enable_mm_embeds=True, mm_processor_kwargs=kwargs
    )
    width = processor.info.get_expected_hidden_size()
    pictures = [draw(900, 300), draw(60, 60)][: family.max_images]
    mark = family.placeholder
    for prompt in both_kinds(processor, f"a {mark}\n b {mark * (len(pictures) - 1)}"):
        expected = processor.apply(prompt, {"image": pictures})
        ranges = expected.mm_placeholders["image"]
        embeds = [np.full((one.get_num_embeds(), width), 0.5, np.float32) for one in ranges]
        inputs = processor.apply(prompt, {"image": {"image_embeds": embeds}})
        assert inputs.prompt_token_ids == expected.prompt_token_ids
        assert inputs.mm_placeholders == expected.mm_placeholders
        items = [item.get_data() for item in inputs.mm_kwargs["image"] if item is not None]
        assert [list(item) for item in items] == [["image_embeds"]] * len(pictures)
        assert [item["image_embeds"].shape for item in items] == [one.shape for one in embeds]
