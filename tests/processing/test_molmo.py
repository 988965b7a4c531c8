"""Molmo's prompts and crops: where its own rules end, and what it refuses."""

from pathlib import Path
from shutil import copytree
from typing import Any

import jinja2.sandbox
import pytest
import torch
from PIL import Image

from mmjax.errors import CheckpointError, RequestError
from mmjax.models.molmo.image_processor import Grid, MolmoImageProcessor, choose_tiling
from mmjax.models.molmo.processor import CHAT_TEMPLATE, format_prompt
from mmjax.models.registry import create_processor
from tests.kit import draw
from tests.processing.families import molmo
from tests.processing.families.family import edit_json

BOS = 340
PUBLISHED = MolmoImageProcessor()


@pytest.fixture(scope="module")
def processor() -> Any:
    return molmo.make_processor()


def ids_of(text: str) -> list[int]:
    return molmo.tokenizer().encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("what", " User: what Assistant:"),
        (" what", " User:  what Assistant:"),
        ("User: what Assistant:", " User: what Assistant:"),
        (" User: what Assistant:", " User: what Assistant:"),
        ("User: a Assistant: b User: c Assistant:", " User: a Assistant: b User: c Assistant:"),
        ("Users", " User: Users Assistant:"),
    ],
)
def test_a_text_becomes_a_turn_once(processor: Any, text: str, expected: str):
    assert format_prompt(text, "role", always_start_with_space=True) == expected
    for prompt in (text, ids_of(text), [BOS, *ids_of(text)], expected, ids_of(expected)):
        assert processor.apply(prompt).prompt_token_ids == [BOS, *ids_of(expected)]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"message_format": "none"}, " what"),
        ({"always_start_with_space": False}, "User: what Assistant:"),
        ({"text_kwargs": {"message_format": "none", "always_start_with_space": False}}, "what"),
    ],
)
def test_the_format_can_be_turned_off(processor: Any, kwargs: dict[str, Any], expected: str):
    operators = molmo.make_processor(mm_processor_kwargs=kwargs)
    for prompt in ("what", ids_of("what")):
        inputs = processor.apply(prompt, hf_processor_mm_kwargs=kwargs)
        assert inputs.prompt_token_ids == [BOS, *ids_of(expected)]
        assert operators.apply(prompt).prompt_token_ids == [BOS, *ids_of(expected)]


def test_a_conversation_is_written_as_published():
    template = jinja2.sandbox.SandboxedEnvironment().from_string(CHAT_TEMPLATE)
    messages = [
        {"role": role, "content": text}
        for role, text in [("user", "a"), ("assistant", "b"), ("user", "c")]
    ]
    written = template.render(messages=messages, add_generation_prompt=True)
    assert written == "User: a Assistant: b User: c Assistant:"
    assert template.render(messages=messages[:2]) == "User: a Assistant: b"


@pytest.mark.parametrize(
    ("height", "width", "tiling"),
    [
        (600 - 112, 900 - 112, Grid(3, 4)),
        (336 - 112, 336 - 112, Grid(1, 1)),
        (337 - 112, 336 - 112, Grid(2, 1)),
        (3000, 224, Grid(12, 1)),
        (10_000, 10_000, Grid(3, 3)),
        (0, -50, Grid(1, 1)),
    ],
)
def test_the_tiling_that_enlarges_least(height: int, width: int, tiling: Grid):
    assert choose_tiling(height, width, window=224, max_crops=12) == tiling


def test_the_largest_published_image_is_a_strip():
    size, num_embeds = PUBLISHED.find_largest({})
    assert num_embeds == 144 + 12 * 100
    assert sorted(size) == [336, 12 * 224 + 112]


def test_a_masks_row_belongs_to_the_crop_before_it(processor: Any):
    """As the published processor has it: the model was trained so."""
    data = processor.apply("what", {"image": draw(310, 90)}).mm_kwargs.get_data()
    masks = data["image_masks"]
    assert (masks[-1] == -1).all()
    assert (masks[:-1] >= 0).all()
    assert (masks[:-1] < 1).any()


def test_a_sliver_is_refused(processor: Any):
    with pytest.raises(RequestError, match=r"1x500 pixels.*short side") as caught:
        processor.apply("what", {"image": Image.new("RGB", (1, 500))})
    assert (caught.value.status, caught.value.param) == (400, "multi_modal_data")


@pytest.mark.parametrize("value", [0, 129, True, 2.0, "3"])
def test_a_bad_number_of_crops_is_refused(processor: Any, value: Any):
    with pytest.raises(RequestError, match="max_crops"):
        processor.apply("a", {"image": draw(9, 9)}, hf_processor_mm_kwargs={"max_crops": value})


def test_an_unknown_format_is_refused(processor: Any):
    with pytest.raises(RequestError, match=r"message_format.*'chat'.*role"):
        processor.apply("what", hf_processor_mm_kwargs={"message_format": "chat"})


def test_a_second_image_is_refused(processor: Any):
    with pytest.raises(RequestError, match="At most 1 image"):
        processor.apply("what", {"image": [draw(9, 9), draw(9, 9)]})


def test_embeddings_are_refused():
    taking = molmo.make_processor(enable_mm_embeds=True)
    with pytest.raises(RequestError, match="takes images, not their embeddings"):
        taking.apply("what", {"image": [torch.ones(48, 96)]})


def test_ids_behind_the_new_tokens_are_refused(processor: Any):
    assert processor.apply([384 + 127]).prompt_token_ids[0] == BOS
    with pytest.raises(RequestError, match="512"):
        processor.apply([384 + 128])


@pytest.mark.parametrize(
    ("file", "edit", "match"),
    [
        ("preprocessor_config", {"do_normalize": False}, "do_normalize.*False"),
        ("preprocessor_config", {"image_padding_mask": False}, "image_padding_mask.*False"),
        ("preprocessor_config", {"overlap_margins": [2, 3]}, r"overlap_margins.*\[2, 3\]"),
        ("preprocessor_config", {"overlap_margins": [4, 4]}, r"overlap_margins.*\[4, 4\]"),
        ("preprocessor_config", {"image_patch_size": 16}, "image_patch_size.*16.*14"),
        ("preprocessor_config", {"image_token_length_w": 5}, "image_token_length_w.*5.*4"),
        ("preprocessor_config", {"base_image_input_size": [56, 56]}, "base_image_input_size"),
        ("config", {"embedding_size": 380}, "<im_start>.*384.*380"),
        ("tokenizer_config", {"eos_token": None, "pad_token": None}, "neither a BOS nor an EOS"),
    ],
)
def test_a_checkpoint_at_odds_with_itself_is_refused(
    tmp_path: Path, file: str, edit: dict[str, Any], match: str
):
    path = Path(copytree(molmo.PATH, tmp_path / "molmo"))
    edit_json(path / f"{file}.json", edit)
    with pytest.raises(CheckpointError, match=match):
        create_processor(path).info.get_hf_processor()
