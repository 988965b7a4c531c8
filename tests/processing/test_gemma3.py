"""Gemma 3's own: what clients may write, newlines, crops."""

from typing import Any

import numpy as np
import pytest

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.errors import CheckpointError, RequestError
from mmjax.models.gemma3.processor import PanAndScan
from mmjax.processing import ImageSize
from tests.families import FAMILIES, gemma3
from tests.kit import draw
from tests.processing.conftest import both_kinds

BOI = "<start_of_image>"


FAMILY = FAMILIES["gemma3"]


def test_other_marks_in_the_users_text_bind_no_picture(processor: Any):
    prompt = f"<end_of_image>\n\n{BOI}\n<end_of_image><end_of_turn>"
    inputs = processor.apply(prompt, {"image": draw(4, 4)})
    (placeholder,) = inputs.mm_placeholders["image"]
    soft = processor.info.get_tokenizer().image_token_id
    positions = [i for i, token_id in enumerate(inputs.prompt_token_ids) if token_id == soft]
    ((start, end),) = placeholder.extract_embeds_range()
    assert positions == list(range(start, end + 1))


def test_ranges_overlap_by_the_token_that_two_pictures_share(processor: Any):
    inputs = processor.apply(BOI * 2, {"image": [draw(4, 4)] * 2})
    first, second = inputs.mm_placeholders["image"]
    assert first.offset + first.length == second.offset + 1
    mask = [False, False, True, True, True, True, False, False]
    np.testing.assert_array_equal(first.is_embed, mask)
    np.testing.assert_array_equal(second.is_embed, mask)
    shared = inputs.prompt_token_ids[second.offset]
    assert processor.info.get_tokenizer().decode([shared]) == "\n\n\n\n"


@pytest.mark.parametrize("num_newlines", range(12))
def test_newline_runs_of_any_length_are_hfs(processor: Any, num_newlines: int):
    run = "\n" * num_newlines
    prompt = f"a{run}{BOI}{run}{BOI}{run}b"
    images = [draw(4, 4)] * 2
    hf = gemma3.hf_processor()(text=prompt, images=images, return_tensors="np")
    for kind in both_kinds(processor, prompt):
        inputs = processor.apply(kind, {"image": images})
        assert inputs.prompt_token_ids == hf["input_ids"][0].tolist()


def test_token_prompts_keep_the_ids_that_no_picture_touches(processor: Any):
    """Two single newlines are not what the tokenizer would write, but they are the client's."""
    tokenizer = processor.info.get_tokenizer()
    newline, boi = tokenizer.convert_tokens_to_ids("\n"), tokenizer.boi_token_id
    odd = [newline, newline, *tokenizer.encode("a", add_special_tokens=False)]
    for kwargs in ({}, {"do_pan_and_scan": True}):
        inputs = processor.apply(
            [*odd, boi, *odd[::-1]], {"image": draw(520, 260)}, hf_processor_mm_kwargs=kwargs
        )
        assert inputs.prompt_token_ids[:3] == odd
        assert inputs.prompt_token_ids[-2:] == [newline, newline]


@pytest.mark.parametrize(
    ("size", "num_crops"),
    [
        ((640, 480), 2),
        ((600, 520), 0),
        ((500, 500), 0),
        ((2000, 256), 4),
        ((256, 2000), 4),
        ((2000, 255), 0),
        ((900, 300), 3),
        ((300, 900), 3),
        ((1, 1), 0),
    ],
)
def test_crops_are_counted_as_hf_counts_them(size: tuple[int, int], num_crops: int):
    processor = gemma3.make_processor(mm_processor_kwargs={"do_pan_and_scan": True})
    inputs = processor.apply(BOI, {"image": draw(*size)})
    item = inputs.mm_kwargs["image"][0]
    assert item is not None
    data = item.get_data()
    assert data["num_patches"] == num_crops + 1
    assert data["num_patches"].dtype == np.int64
    assert data["pixel_values"].shape == (num_crops + 1, 3, 56, 56)
    assert inputs.mm_placeholders["image"][0].get_num_embeds() == 4 * (num_crops + 1)


def test_pan_and_scan_needs_to_be_on():
    off = PanAndScan(is_enabled=False, min_crop_size=256, max_num_crops=4, min_ratio=1.2)
    assert off.count_crops(ImageSize(2000, 256)) == 0


def test_kwargs_of_a_request_win_over_the_operators():
    processor = gemma3.make_processor(mm_processor_kwargs={"do_pan_and_scan": True})
    for kwargs in ({"do_pan_and_scan": False}, {"images_kwargs": {"do_pan_and_scan": False}}):
        inputs = processor.apply(BOI, {"image": draw(900, 300)}, hf_processor_mm_kwargs=kwargs)
        assert inputs.mm_placeholders["image"][0].get_num_embeds() == 4


def test_transparency_is_white_before_hf_sees_it(processor: Any):
    clear = draw(20, 20).copy()
    clear.putalpha(0)
    inputs = processor.apply(BOI, {"image": clear})
    assert np.all(inputs.mm_kwargs.get_data()["pixel_values"] == 255)


def test_a_checkpoint_that_contradicts_itself_is_named():
    config = gemma3.model_config()
    config.hf_config.mm_tokens_per_image = 16
    from mmjax.models.registry import create_processor

    with pytest.raises(CheckpointError, match=r"`image_seq_length` .* is 4, but .* is 16"):
        create_processor(config).apply(BOI, {"image": draw(4, 4)})


def test_the_users_array_may_change_after_it_was_given():
    cache = MultiModalProcessorOnlyCache(2**24)
    processor = gemma3.make_processor(processor_cache=cache, enable_mm_embeds=True)
    rows = np.full((4, 32), 0.5, np.float32)
    (item,) = processor.apply(BOI, {"image": {"image_embeds": rows}}).mm_kwargs["image"]
    rows[:] = 7
    assert item is not None
    assert (item["image_embeds"].data == 0.5).all()


def test_crops_that_are_not_those_that_were_counted_are_told(monkeypatch: pytest.MonkeyPatch):
    """HF drops how many there are of each picture, so that they are counted again."""
    processor = gemma3.make_processor()
    monkeypatch.setattr(PanAndScan, "count_crops", lambda self, size: 5)
    kwargs = {"do_pan_and_scan": True}
    with pytest.raises(RequestError, match=r"made 1 images and crops of 1 .* gives 6") as caught:
        processor.apply(BOI, {"image": draw(4, 4)}, hf_processor_mm_kwargs=kwargs)
    assert caught.value.param == "mm_processor_kwargs"
