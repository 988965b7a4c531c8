"""Training rows hold, token for token, what chat template and processor make of the same chat."""

import random
from typing import Any

import numpy as np
import pytest
from batches import BatchPlan, make_batch
from packing import ROW_LENGTH, Row, chat_pieces, encode, pack_chats, pack_shared
from PIL import Image
from questions import Question
from scenes import EVALUATION, TRAINING, sample_scene
from transformers import AutoTokenizer, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tests.checkpoints.conftest import TINY_SCENES

QUESTION = Question(kind="color", text="What color is it?", answer="red", form="color")
PICTURE = {"type": "image"}
TEXT = {"type": "text", "text": QUESTION.text}


@pytest.fixture(scope="module")
def processor() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(TINY_SCENES / "model")
    images = Gemma3ImageProcessorPil.from_pretrained(TINY_SCENES / "model")
    return Gemma3Processor(images, tokenizer, image_seq_length=36)


def served_ids(processor: Any, messages: list[dict[str, Any]]) -> list[int]:
    """The prompt that a request becomes, by HF's template and processor."""
    text = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    count = text.count("<start_of_image>")
    pictures = [[Image.new("RGB", (50, 70))] * count] if count else None
    return processor(text=text, images=pictures, add_special_tokens=False)["input_ids"][0]


def chat_row(pieces: list[str | int]) -> Row:
    row = Row()
    position = 0
    for piece in pieces:
        if isinstance(piece, str):
            position = row.add(encode(piece), 1, position)
        else:
            position = row.add_picture(1, position, piece)
    return row


@pytest.mark.parametrize("count", [1, 2])
def test_shared_rows_are_the_served_prompt(processor: Any, count: int):
    row = pack_shared(range(count), lambda: QUESTION, tries=2)
    served = served_ids(processor, [{"role": "user", "content": [*[PICTURE] * count, TEXT]}])
    segment = np.array(row.segment)
    for part in (1, 2):
        alone = [token for token, s in zip(row.tokens, segment, strict=True) if s in (0, part)]
        positions = [p for p, s in zip(row.positions, segment, strict=True) if s in (0, part)]
        assert alone == [*served, *encode("red")]
        assert positions == list(range(len(alone)))
    index, goal = row.targets[0]
    assert row.tokens[: index + 1][-len(served) :] == served
    assert (goal,) == encode("red")


REPLY = "<end_of_turn>\n<start_of_turn>model\n"
LAYOUTS = {
    "question first": ([QUESTION.text, 0], "", [{"role": "user", "content": [TEXT, PICTURE]}]),
    "two after": (
        [QUESTION.text, 0, 1],
        "",
        [{"role": "user", "content": [TEXT, PICTURE, PICTURE]}],
    ),
    "system": (
        [0, QUESTION.text],
        "Be brief.",
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [PICTURE, TEXT]},
        ],
    ),
    "as a string": (
        [0, "\n" + QUESTION.text],
        "",
        [{"role": "user", "content": "<start_of_image>\n" + QUESTION.text}],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chats_are_the_served_prompt(processor: Any, layout: str):
    turn, system, messages = LAYOUTS[layout]
    pieces = chat_pieces(turn, system=system)
    row = chat_row([*pieces[:-1], str(pieces[-1]) + REPLY])
    assert row.tokens == served_ids(processor, messages)


def test_follow_ups_are_the_served_prompt(processor: Any):
    pieces = chat_pieces([0, QUESTION.text])
    again = f"<end_of_turn>\n<start_of_turn>user\n{QUESTION.text}{REPLY}"
    row = chat_row([*pieces[:-1], str(pieces[-1]) + REPLY, "red", again])
    messages = [
        {"role": "user", "content": [PICTURE, TEXT]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": QUESTION.text},
    ]
    assert row.tokens == served_ids(processor, messages)


def test_rows_keep_within_their_bounds():
    rng = random.Random(0)
    batch, rows = make_batch(rng, BatchPlan(), TRAINING, {})
    for r, row in enumerate(rows):
        assert len(row.tokens) <= ROW_LENGTH
        assert row.questions
        for question, start, stop in row.questions:
            goals = [goal for _, goal in row.targets[start:stop]]
            assert goals == [*encode(question.answer), *encode("<end_of_turn>")]
            shown = [row.tokens[index] for index, _ in row.targets[start + 1 : stop]]
            assert shown == goals[:-1]
        used = batch.rows.features[r][batch.rows.features[r] >= 0]
        assert len(used) % 36 == 0
        assert set(used // 36) == {picture - 1 for picture in row.picture if picture}
    assert batch.pixels.shape == (32, 96, 96, 3)
    assert batch.labels["centre"].shape == (32, 36)


def test_chats_lie_side_by_side():
    rng = random.Random(1)
    scenes = [sample_scene(rng, EVALUATION, "47") for _ in range(4)]
    for _ in range(20):
        row = pack_chats(scenes, rng)
        positions, segment = np.array(row.positions), np.array(row.segment)
        for part in set(row.segment):
            assert positions[segment == part].tolist() == list(range((segment == part).sum()))
