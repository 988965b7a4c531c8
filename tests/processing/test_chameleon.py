"""Chameleon's own: the separator at a prompt's end, framed pictures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.families import FAMILIES
from tests.families.directories import edit_golden, golden_processor
from tests.kit import draw
from tests.processing.conftest import both_kinds

IMAGE, IMAGE_ID, START_ID, END_ID = "<image>", 964, 965, 966
SEP, SEP_ID = "<reserved08706>", 967
COMPLETION = {"return_for_text_completion": True}


FAMILY = FAMILIES["chameleon"]


@pytest.mark.parametrize("prompt", ["", "what", f"what{SEP}", f"a{SEP}b", IMAGE, f"a{IMAGE}{SEP}"])
def test_the_separator_ends_a_prompt_once(processor: Any, prompt: str):
    images = {"image": [draw(9, 9)] * prompt.count(IMAGE)}
    expected = prompt.count(SEP) + (not prompt.endswith(SEP))
    for _ in range(2):  # the second time, a cache has the picture
        for kind in both_kinds(processor, prompt):
            token_ids = processor.apply(kind, images).prompt_token_ids
            assert token_ids[-1] == SEP_ID
            assert token_ids.count(SEP_ID) == expected


def test_a_prompt_of_no_tokens_gets_a_separator(processor: Any):
    assert processor.apply([]).prompt_token_ids == [SEP_ID]


@pytest.mark.parametrize("kwargs", [COMPLETION, {"text_kwargs": COMPLETION}])
@pytest.mark.parametrize("prompt", ["what", f"a {IMAGE} b"])
def test_a_completion_has_no_separator(prompt: str, kwargs: dict[str, Any]):
    images = {"image": [draw(9, 9)] * prompt.count(IMAGE)}
    given: list[tuple[dict[str, Any], dict[str, Any]]]
    given = [({}, kwargs), ({"mm_processor_kwargs": kwargs}, {})]
    for config, request_kwargs in given:
        processor = golden_processor("chameleon", **config)
        for kind in both_kinds(processor, prompt):
            inputs = processor.apply(kind, images, hf_processor_mm_kwargs=request_kwargs)
            assert SEP_ID not in inputs.prompt_token_ids


def test_a_request_may_want_the_operators_separator_back():
    processor = golden_processor("chameleon", mm_processor_kwargs=COMPLETION)
    kwargs = {"return_for_text_completion": False}
    for kind in both_kinds(processor, IMAGE):
        inputs = processor.apply(kind, {"image": draw(9, 9)}, hf_processor_mm_kwargs=kwargs)
        assert inputs.prompt_token_ids[-1] == SEP_ID


def test_only_what_the_frame_holds_takes_embeddings(processor: Any):
    inputs = processor.apply(f"{IMAGE}{IMAGE}", {"image": [draw(9, 9), draw(70, 80)]})
    first, second = inputs.mm_placeholders["image"]
    framed = [START_ID, *[IMAGE_ID] * 256, END_ID]
    assert inputs.prompt_token_ids == [0, *framed, *framed, SEP_ID]
    assert (first.offset, second.offset) == (1, 259)
    mask = [token_id == IMAGE_ID for token_id in framed]
    np.testing.assert_array_equal(first.is_embed, mask)
    np.testing.assert_array_equal(second.is_embed, mask)


def test_frames_in_the_users_text_bind_no_picture(processor: Any):
    inputs = processor.apply(f"<racm3:break><eoss>{IMAGE}<eoss>", {"image": draw(9, 9)})
    (placeholder,) = inputs.mm_placeholders["image"]
    assert placeholder.offset == 3
    assert inputs.prompt_token_ids[:5] == [0, START_ID, END_ID, START_ID, IMAGE_ID]


def test_the_count_is_the_vq_vaes(tmp_path: Path):
    path = edit_golden(
        "chameleon",
        tmp_path,
        config={"vq_config.resolution": 32},
        processor_config={
            "image_seq_length": 64,
            "image_processor.size": {"shortest_edge": 32},
            "image_processor.crop_size": {"height": 32, "width": 32},
        },
    )
    processor = golden_processor("chameleon", path=path)
    assert processor.info.get_mm_max_tokens_per_item(512) == {"image": 64}
    for kind in both_kinds(processor, IMAGE):
        inputs = processor.apply(kind, {"image": draw(90, 70)})
        assert inputs.prompt_token_ids.count(IMAGE_ID) == 64


def test_a_checkpoint_of_old_names_no_length_and_no_image_token(tmp_path: Path):
    path = edit_golden(
        "chameleon",
        tmp_path,
        config={"image_token_id": None, "vocabulary_map": None},
        processor_config={"image_seq_length": None},
    )
    inputs = golden_processor("chameleon", path=path).apply(IMAGE, {"image": draw(9, 9)})
    assert inputs.prompt_token_ids.count(IMAGE_ID) == 256
