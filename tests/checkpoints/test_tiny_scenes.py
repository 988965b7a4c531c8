"""The trained checkpoint: right answers, the same in HF, whoever drew the picture."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from evaluate import (
    Answerer,
    Item,
    ask_items,
    draw_items,
    find_misses,
    report,
    serve_answers,
    shuffle_scenes,
)
from PIL import Image, ImageDraw
from questions import ONE_KINDS, PAIR_KINDS
from scenes import COLORS, draw

from tests.checkpoints.conftest import FEW_PROGRAMS, TINY_SCENES

pytestmark = pytest.mark.as_served

MODEL = TINY_SCENES / "model"
FEW, MANY = 96, 2000


@pytest.fixture(scope="module")
def answer() -> Answerer:
    return serve_answers(MODEL, **FEW_PROGRAMS)


def test_it_is_small_and_whole():
    assert (MODEL / "model.safetensors").stat().st_size <= 16 * 2**20
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForConditionalGeneration"]


def test_it_answers(answer: Answerer):
    items = draw_items(FEW, seed=11)
    right = ask_items(answer, items, [item.scenes for item in items])
    assert sum(right) >= 0.93 * FEW


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_meets_its_targets(answer: Answerer):
    items = draw_items(MANY, seed=12)
    right = ask_items(answer, items, [item.scenes for item in items])
    shuffled = ask_items(answer, items, shuffle_scenes(items, 0))
    lines = report(items, right, shuffled)
    assert find_misses(lines) == [], "\n".join(map(str, lines))


def plain_picture(shape: str, color: str, size: tuple[int, int] = (224, 224)) -> Image.Image:
    """As a user draws it: hard edges on white."""
    picture = Image.new("RGB", size, "white")
    pen, (width, height) = ImageDraw.Draw(picture), size
    box = (width * 0.3, height * 0.3, width * 0.7, height * 0.7)
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "square":
        pen.rectangle(box, fill=color)
    else:
        pen.polygon([(width * 0.5, box[1]), (box[2], box[3]), (box[0], box[3])], fill=color)
    return picture


@pytest.mark.parametrize("shape", ["circle", "square", "triangle"])
def test_plain_drawings(answer: Answerer, shape: str):
    prompts = [([plain_picture(shape, color)], f"What color is the {shape}?") for color in COLORS]
    assert answer(prompts) == list(COLORS)
    prompts = [([plain_picture(shape, color)], "Describe the picture.") for color in COLORS]
    names = [f"{'an' if color == 'orange' else 'a'} {color} {shape}" for color in COLORS]
    assert answer(prompts) == names


SIZES = [(64, 64), (96, 96), (640, 480), (300, 600)]


@pytest.mark.parametrize("size", [*SIZES, pytest.param((1024, 1024), marks=pytest.mark.slow)])
def test_any_resolution(answer: Answerer, size: tuple[int, int]):
    prompts = [([plain_picture("circle", "red", size)], "What color is the circle?")]
    prompts += [([plain_picture("circle", "blue", size)], "How many objects are there?")]
    assert answer(prompts) == ["red", "1"]


class Reference:
    """The checkpoint in HF transformers, on torch."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoTokenizer, Gemma3ForConditionalGeneration, Gemma3Processor
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        self.torch = torch
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        images = Gemma3ImageProcessorPil.from_pretrained(MODEL)
        self.processor: Any = Gemma3Processor(images, tokenizer, image_seq_length=36)
        loaded: Any = Gemma3ForConditionalGeneration.from_pretrained(
            MODEL, attn_implementation="eager", output_loading_info=True
        )
        self.model, self.loading_info = loaded
        self.model.eval()

    def answer(self, item: Item, max_tokens: int = 48) -> str:
        pictures = [draw(scene) for scene in item.scenes]
        parts: list[dict[str, str]] = [{"type": "image"}] * len(pictures)
        parts = [*parts, {"type": "text", "text": item.question.text}]
        tokenizer = self.processor.tokenizer
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        inputs = self.processor(
            text=text, images=[pictures], add_special_tokens=False, return_tensors="pt"
        )
        with self.torch.no_grad():
            ids = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def test_transformers_loads_every_tensor(reference: Reference):
    assert not any(reference.loading_info[key] for key in ("missing_keys", "unexpected_keys"))


def compare(answer: Answerer, reference: Reference, items: Sequence[Item]) -> None:
    prompts = [([draw(scene) for scene in item.scenes], item.question.text) for item in items]
    assert answer(prompts) == [reference.answer(item) for item in items]


def test_transformers_gives_the_same_answers(answer: Answerer, reference: Reference):
    items = draw_items(len(ONE_KINDS + PAIR_KINDS), seed=21)
    compare(answer, reference, items)


@pytest.mark.slow
def test_transformers_gives_the_same_200_answers(answer: Answerer, reference: Reference):
    compare(answer, reference, draw_items(200, seed=22))
