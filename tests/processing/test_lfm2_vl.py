"""LFM2-VL's own: the largest picture, slivers, and files that contradict each other."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.errors import CheckpointError, RequestError
from mmjax.models.lfm2_vl.processor import Budget, Lfm2VLImageProcessor, find_largest
from mmjax.processing.items.items import ImageSize
from tests.families.directories import golden_processor
from tests.families.lfm2_vl import IMAGE, LFM2_VL, SETTINGS, hf_processor, write_files
from tests.kit import draw

PUBLISHED = Budget()


def test_a_published_pictures_tiles_and_thumbnail_are_hfs() -> None:
    """12 megapixels: ten tiles of 256 embeddings, and a thumbnail of at most as many."""
    plan = PUBLISHED.plan(ImageSize(width=4000, height=3000))
    assert (plan.columns, plan.rows, plan.whole) == (3, 2, (576, 416))
    assert PUBLISHED.count_tokens(ImageSize(width=4000, height=3000)) == 6 * 256 + 18 * 13


def test_the_largest_published_picture_has_ten_tiles() -> None:
    size, most = find_largest(PUBLISHED)
    assert most == PUBLISHED.count_tokens(size)
    assert 10 * 256 < most <= 11 * 256


@settings(max_examples=400, deadline=None)
@given(width=st.integers(1, 6000), share=st.floats(1 / 40, 40))
def test_no_published_picture_is_larger(width: int, share: float) -> None:
    size = ImageSize(width=width, height=max(1, round(width * share)))
    assert PUBLISHED.count_tokens(size) <= find_largest(PUBLISHED)[1]


def test_slivers_beyond_the_budget_are_refused_and_hf_has_no_room_for_them() -> None:
    processor = LFM2_VL.make_processor()
    picture = draw(1200, 2)
    with pytest.raises(RequestError, match=r"1200x2 pixels; scaled, .* may have 12: crop it"):
        processor.apply(IMAGE, {"image": picture})
    with pytest.raises(RuntimeError, match=r"equal size, but got \[48, .* and \[\d{3}"):
        hf_processor()(text=[IMAGE], images=[picture], return_tensors="pt")


def test_bos_is_the_chat_templates_to_write(tmp_path: Path) -> None:
    """As in HF's processor, whatever the tokenizer does of itself."""
    processor = golden_processor("lfm2_vl", path=write_files(tmp_path, adds_bos=True))
    tokenizer = processor.info.get_tokenizer()
    ids = tokenizer.encode("what is it")
    assert ids[0] == tokenizer.bos_token_id
    assert processor.apply("what is it", {}).prompt_token_ids == ids[1:]
    begun = processor.apply(f"{tokenizer.bos_token}{IMAGE}what is it", {"image": draw(60, 60)})
    assert begun.prompt_token_ids[0] == tokenizer.bos_token_id
    assert begun.prompt_token_ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_tiles": 0}, "`max_tiles` is 0 .*it must be a number of tiles"),
        ({"min_tiles": 4, "max_tiles": 3}, "`min_tiles` is 4 .*it must be at most"),
        (
            {"max_image_tokens": 3},
            "`min_image_tokens` is 4 .* at most `max_image_tokens`, which is 3",
        ),
        ({"max_image_tokens": 5000}, "`max_image_tokens` is 5000 .* to 4096"),
        ({"min_image_tokens": 1.5}, "`min_image_tokens` is 1.5 .* a number of embeddings"),
        ({"use_thumbnail": "no"}, "`use_thumbnail` is 'no' .* true or false"),
    ],
)
def test_kwargs_that_no_picture_can_be_cut_by_are_refused(kwargs: dict[str, Any], match: str):
    processor = LFM2_VL.make_processor()
    with pytest.raises(RequestError, match=match) as error:
        processor.apply(IMAGE, {"image": draw(90, 70)}, hf_processor_mm_kwargs=kwargs)
    assert error.value.status == 400


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"encoder_patch_size": 16}, "`encoder_patch_size` .* is 16, but config.json has 8"),
        ({"downsample_factor": 1}, "`downsample_factor` .* is 1, but config.json has 2"),
        ({"tile_size": 40}, "`tile_size` .* is 40; it must be a multiple of 16"),
    ],
)
def test_settings_that_do_not_fit_the_tower_are_refused(changes: dict[str, Any], match: str):
    with pytest.raises(CheckpointError, match=match):
        Lfm2VLImageProcessor({**SETTINGS, **changes}, patch_size=8, factor=2)
