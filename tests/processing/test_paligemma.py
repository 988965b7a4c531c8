"""PaliGemma's prompts and objects: where its own rules end, and what it refuses."""

from typing import Any

import pytest

from tests.families.paligemma import PALIGEMMA, call_hf
from tests.kit import draw

BOX = "<loc0256><loc0000><loc0512><loc1023>"


@pytest.fixture(scope="module")
def processor() -> Any:
    return PALIGEMMA.make_processor()


@pytest.mark.parametrize("text", ["detect car", "a\n", "a\n\n", "", "\n"])
def test_a_newline_merges_with_those_before_it(processor: Any, text: str):
    images = [draw(40, 30), draw(30, 40)]
    text = f"<image>of <image>{text}"
    expected = call_hf(text, images, {}).input_ids
    for prompt in (text, processor.info.get_tokenizer().encode(text)):
        assert processor.apply(prompt, {"image": images}).prompt_token_ids == expected


def test_a_whole_prompt_is_one_already(processor: Any):
    tokenizer = processor.info.get_tokenizer()
    for text, images in [("<image><bos>detect car\n", [draw(40, 30)]), ("<bos>detect car\n", [])]:
        whole = tokenizer.encode(text, add_special_tokens=False)
        framed = processor.info.frame_prompt(whole, {"image": len(images)}, {})
        assert framed == whole


def test_an_answer_is_parsed_by_the_image_as_it_was_sent(processor: Any):
    inputs = processor.prepare("<image>detect car", {"image": [draw(64, 32)]})
    ids = processor.info.get_tokenizer().encode(f"{BOX} car<eos>", add_special_tokens=False)
    found = inputs.parse_answer(ids)["objects"]
    assert found == {"bboxes": [[0, 8, 64, 16]], "labels": ["car"]}
    assert processor.prepare("detect car", {}).parse_answer is None
    two = {"image": [draw(64, 32), draw(32, 32)]}
    assert processor.prepare("<image><image>detect car", two).parse_answer is None, "of which one?"
