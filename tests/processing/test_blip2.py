"""BLIP-2's own: one picture before the whole prompt, and checkpoints from before `<image>`."""

import json
from pathlib import Path
from typing import Any

import pytest

from mmjax.errors import RequestError
from tests.families import FAMILIES
from tests.families.directories import edit_golden, golden_processor
from tests.kit import draw

IMAGE_ID = 999


FAMILY = FAMILIES["blip2"]


@pytest.mark.parametrize("prompt", ["", "what", "</s>"])
def test_queries_stand_before_the_first_token(processor: Any, prompt: str):
    token_ids = processor.info.get_tokenizer().encode(prompt)
    for kind in (prompt, token_ids):
        inputs = processor.apply(kind, {"image": draw(90, 70)})
        assert inputs.prompt_token_ids == [IMAGE_ID] * 8 + token_ids
        (placeholder,) = inputs.mm_placeholders["image"]
        assert (placeholder.offset, placeholder.length, placeholder.is_embed) == (0, 8, None)


def test_a_prompt_of_no_tokens_gets_the_queries_alone(processor: Any):
    assert processor.apply([], {"image": draw(9, 9)}).prompt_token_ids == [IMAGE_ID] * 8


def test_special_tokens_are_left_out_on_demand(processor: Any):
    """After a chat template, which writes them itself."""
    inputs = processor.apply(
        "what", {"image": draw(9, 9)}, tokenization_kwargs={"add_special_tokens": False}
    )
    words = processor.info.get_tokenizer().encode("what", add_special_tokens=False)
    assert inputs.prompt_token_ids == [IMAGE_ID] * 8 + words


def test_the_count_is_the_configs(tmp_path: Path):
    edit = {"num_query_tokens": 3}
    path = edit_golden("blip2", tmp_path, config=edit, processor_config=edit)
    processor = golden_processor("blip2", path=path)
    assert processor.apply("", {"image": draw(9, 9)}).prompt_token_ids == [IMAGE_ID] * 3 + [2]
    assert processor.info.get_mm_max_tokens_per_item(512) == {"image": 3}


def test_a_checkpoint_from_before_the_image_token_gets_it(tmp_path: Path):
    """Its tokenizer lacks `<image>`, its processor the count: both follow config.json."""
    path = edit_golden(
        "blip2", tmp_path, processor_config={"num_query_tokens": None},
        config={"image_token_index": None},
    )  # fmt: skip
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [one for one in tokenizer["added_tokens"] if one["id"] != IMAGE_ID]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    old, new = golden_processor("blip2", path=path), golden_processor("blip2")
    for prompt in ("what is it", [2, 50, 60]):
        ours = old.apply(prompt, {"image": draw(90, 70)})
        assert ours.prompt_token_ids == new.apply(prompt, {"image": draw(90, 70)}).prompt_token_ids
    with pytest.raises(RequestError, match="reserved"):
        golden_processor("blip2", path=path).apply("a <image>", {})  # already in the first prompt
