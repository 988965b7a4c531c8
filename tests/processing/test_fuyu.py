"""Fuyu's own: how pictures are scaled and cut, and how a prompt is framed around one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.models.fuyu.processor import FuyuImageProcessor
from mmjax.parity.reference import make_pixels
from mmjax.processing import ImageSize
from tests.families import FAMILIES, fuyu
from tests.families.directories import edit_golden, golden_processor
from tests.kit import draw
from tests.processing.conftest import both_kinds

IMAGE_ID, NEWLINE_ID, START_ID, ANSWER_ID, SPACE_ID = 997, 998, 1, 7, 319
END_OF_TEXT_ID = 999


FAMILY = FAMILIES["fuyu"]


def rows(num_rows: int, num_columns: int) -> list[int]:
    return [*[IMAGE_ID] * num_columns, NEWLINE_ID] * num_rows


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1920, 1080), (36, 64)),
        ((3840, 2160), (36, 64)),
        ((1, 1), (1, 1)),
        ((30, 31), (2, 1)),
        ((1921, 30), (1, 64)),  # 29.98 pixels high: 29, filled up
        ((3000, 100), (3, 64)),
        ((100, 3000), (36, 2)),
        ((1080, 1920), (36, 21)),
    ],
)
def test_published_pictures_have_this_many_rows_and_columns(
    size: tuple[int, int], grid: tuple[int, int]
):
    """Only what is larger than 1920x1080 is scaled, by one factor, and cut off to whole pixels."""
    assert FuyuImageProcessor().get_grid(ImageSize(*size)) == grid


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400))
def test_patches_of_any_picture_are_hfs(width: int, height: int):
    if not fuyu.takes_size(width, height):
        return
    image = draw(width, height)
    hf = fuyu.call_hf("what", [image], {})
    inputs = golden_processor("fuyu").apply("what", {"image": image})
    assert inputs.prompt_token_ids == hf.input_ids
    data = make_pixels(inputs.mm_kwargs.get_data(), colours_last=True)
    np.testing.assert_allclose(
        data["image_patches"], hf.tensors["image_patches"], rtol=0, atol=1e-6
    )
    num_rows, num_columns = data["image_grid_hw"][0]
    assert hf.input_ids[: num_rows * (num_columns + 1)] == rows(num_rows, num_columns)


def test_a_picture_stands_first_and_newlines_take_no_embeddings(processor: Any):
    for kind in both_kinds(processor, "what"):
        inputs = processor.apply(kind, {"image": draw(25, 12)})
        assert inputs.prompt_token_ids == [*rows(2, 3), START_ID, 479, ANSWER_ID]
        (placeholder,) = inputs.mm_placeholders["image"]
        assert (placeholder.offset, placeholder.length) == (0, 9)
        np.testing.assert_array_equal(placeholder.is_embed, [*[1, 1, 1, 0] * 2, 0])
        assert placeholder.get_num_embeds() == 6


@pytest.mark.parametrize("prompt", ["what<0x04>", "what"])
def test_the_answers_token_ends_a_prompt_once(processor: Any, prompt: str):
    for kind in both_kinds(processor, prompt):
        for _ in range(2):  # the second time, a cache has the picture
            token_ids = processor.apply(kind, {"image": draw(9, 9)}).prompt_token_ids
            assert token_ids == [*rows(1, 1), START_ID, 479, ANSWER_ID]


@pytest.mark.parametrize("prompt", ["", "what", "what<0x04>"])
def test_a_prompt_without_a_picture_stays_as_it_is(processor: Any, prompt: str):
    token_ids = processor.info.get_tokenizer().encode(prompt)
    for kind in (prompt, token_ids):
        assert processor.apply(kind).prompt_token_ids == token_ids


@pytest.mark.parametrize(
    ("token_ids", "framed"),
    [
        ([], [SPACE_ID, ANSWER_ID]),
        ([START_ID], [SPACE_ID, ANSWER_ID]),
        ([479], [479, ANSWER_ID]),
        ([START_ID, 479], [479, ANSWER_ID]),
        ([START_ID, START_ID, 479], [START_ID, 479, ANSWER_ID]),
        ([START_ID, 479, ANSWER_ID], [479, ANSWER_ID]),
        ([479, END_OF_TEXT_ID], [479, END_OF_TEXT_ID, SPACE_ID, ANSWER_ID]),
    ],
)
def test_prompts_of_ids_are_framed(processor: Any, token_ids: list[int], framed: list[int]):
    inputs = processor.apply(token_ids, {"image": draw(9, 9)})
    assert inputs.prompt_token_ids == [*rows(1, 1), START_ID, *framed]


@pytest.mark.parametrize("prompt", ["", "what", "what is|ENDOFTEXT|", "a</s>", "a<s> b"])
def test_special_tokens_in_the_text_are_framed_as_hf_frames_them(processor: Any, prompt: str):
    hf = fuyu.call_hf(prompt, [draw(9, 9)], {})
    for kind in both_kinds(processor, prompt):
        assert processor.apply(kind, {"image": draw(9, 9)}).prompt_token_ids == hf.input_ids


def test_special_tokens_that_a_template_wrote_are_not_doubled(processor: Any):
    for prompt in ("<s>what", "what"):
        inputs = processor.apply(
            prompt, {"image": draw(9, 9)}, tokenization_kwargs={"add_special_tokens": False}
        )
        assert inputs.prompt_token_ids == [*rows(1, 1), START_ID, 479, ANSWER_ID]


def test_a_tokenizer_that_begins_with_end_of_text_loses_it_beside_a_picture(tmp_path: Path):
    """As the published one does: HF writes `<s>` after a picture, whatever the tokenizer's own."""
    token = "|ENDOFTEXT|"
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    path = edit_golden(
        "fuyu",
        tmp_path,
        tokenizer_config={"bos_token": token},
        tokenizer={
            "post_processor.single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "post_processor.special_tokens": {
                token: {"id": token, "ids": [END_OF_TEXT_ID], "tokens": [token]}
            },
        },
    )
    processor = golden_processor("fuyu", path=path)
    assert processor.apply("what").prompt_token_ids == [END_OF_TEXT_ID, 479]
    for kind in both_kinds(processor, "what"):
        inputs = processor.apply(kind, {"image": draw(9, 9)})
        assert inputs.prompt_token_ids == [*rows(1, 1), START_ID, 479, ANSWER_ID]


def test_newlines_in_the_users_text_are_words(processor: Any):
    inputs = processor.apply("|NEWLINE|", {"image": draw(25, 12)})
    (placeholder,) = inputs.mm_placeholders["image"]
    assert (placeholder.offset, placeholder.get_num_embeds()) == (0, 6)
    assert inputs.prompt_token_ids.count(NEWLINE_ID) == 3


def test_the_operators_size_sets_the_maximum():
    kwargs = {"size": {"height": 40, "width": 50}}
    given: list[tuple[dict[str, Any], dict[str, Any]]]
    given = [({"mm_processor_kwargs": kwargs}, {}), ({}, kwargs)]
    for config, request_kwargs in given:
        processor = golden_processor("fuyu", **config)
        inputs = processor.apply(
            "a", {"image": draw(200, 160)}, hf_processor_mm_kwargs=request_kwargs
        )
        assert inputs.prompt_token_ids[:24] == rows(4, 5)
        expected = {"image": 20 if config else 54}
        assert processor.info.get_mm_max_tokens_per_item(4096) == expected


def test_settings_are_the_checkpoints(tmp_path: Path):
    edit = {
        "image_processor.padding_value": 7.0,
        "image_processor.image_mean": [0.1, 0.2, 0.3],
        "image_processor.image_std": [1.0, 2.0, 4.0],
        "image_processor.resample": 0,
    }
    path = edit_golden("fuyu", tmp_path, processor_config=edit)
    image = draw(111, 60)
    hf_processor: Any = fuyu.TorchPatches.from_pretrained(path)
    hf = hf_processor([[image]], return_tensors="np")
    (pixels,) = hf["images"][0]
    inputs = golden_processor("fuyu", path=path).apply("a", {"image": image})
    patches = make_pixels(inputs.mm_kwargs.get_data(), colours_last=True)["image_patches"]
    first, last = (pixels.T[:10, :10].swapaxes(0, 1), pixels.T[80:90, 40:50].swapaxes(0, 1))
    np.testing.assert_allclose(patches[0].reshape(10, 10, 3), first, rtol=0, atol=1e-6)
    np.testing.assert_allclose(patches[-1].reshape(10, 10, 3), last, rtol=0, atol=1e-6)
