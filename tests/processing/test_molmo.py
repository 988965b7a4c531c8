"""Molmo's prompts and crops: where its own rules end, and what it refuses."""

from functools import partial
from typing import Any

import jinja2.sandbox
import pytest

from mmjax.models.molmo.processor import CHAT_TEMPLATE, MolmoImageProcessor, format_prompt
from mmjax.processing.image_processors.crops import Grid, choose_tiling
from tests.families import molmo
from tests.families.molmo import MOLMO
from tests.kit import draw

BOS = 340
PUBLISHED = MolmoImageProcessor()


@pytest.fixture(scope="module")
def processor() -> Any:
    return MOLMO.make_processor()


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
    operators = MOLMO.make_processor(mm_processor_kwargs=kwargs)
    for prompt in ("what", ids_of("what")):
        inputs = processor.apply(prompt, hf_processor_mm_kwargs=kwargs)
        assert inputs.prompt_token_ids == [BOS, *ids_of(expected)]
        assert operators.apply(prompt).prompt_token_ids == [BOS, *ids_of(expected)]


@pytest.mark.parametrize("words", ["User: what {} is it", "what {}{}", "{}", "a {} <|im_end|> {}"])
def test_a_control_tokens_name_stays_a_name_in_ids(processor: Any, words: str):
    """As a chat gives them, of what a user wrote; `<|im_end|>` is that token."""
    name = "<|endoftext|>"
    as_mere_text = partial(
        molmo.tokenizer().encode, add_special_tokens=False, split_special_tokens=True
    )

    def encode(text: str) -> list[int]:
        first, *others = text.format(name, name).split("<|im_end|>")
        ids = as_mere_text(first)
        for other in others:
            ids += [*ids_of("<|im_end|>"), *as_mere_text(other)]
        return ids

    written = format_prompt(words, "role", always_start_with_space=True)
    assert processor.apply(encode(words)).prompt_token_ids == [BOS, *encode(written)]
    assert encode(written).count(BOS) == 0


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


def test_the_last_new_token_is_taken(processor: Any):
    assert processor.apply([384 + 127]).prompt_token_ids[0] == BOS
