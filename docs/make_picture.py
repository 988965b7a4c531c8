"""Draw the README's picture: a fresh scene, questions about it, and what the model answers.

`.venv/bin/python docs/make_picture.py [SEED]` writes docs/question.png; the answers are the
model's own.
"""

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mmjax import LLM, SamplingParams

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "checkpoints" / "tiny_scenes"))

QUESTIONS = (
    "What number is written in the picture?",
    "How many objects are there?",
    "Is there a star?",
    "Describe the picture.",
)
SIDE, MARGIN, LINE = 300, 24, 66


def find_scene(seed: int) -> Image.Image:
    """Draw a square scene of two or three objects and a number."""
    from scenes import EVALUATION, draw, sample_number, sample_scene

    chooser = random.Random(seed)
    while True:
        scene = sample_scene(chooser, EVALUATION, sample_number(chooser))
        if 2 <= len(scene.things) <= 3 and scene.width == scene.height >= SIDE:
            return draw(scene)


def ask(picture: Image.Image) -> list[str]:
    """Return the model's answer to each question."""
    llm = LLM(max_num_seqs=len(QUESTIONS), use_tqdm_on_load=False)
    chats = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_pil", "image_pil": picture},
                    {"type": "text", "text": question},
                ],
            }
        ]
        for question in QUESTIONS
    ]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=48), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def compose(picture: Image.Image, answers: list[str]) -> Image.Image:
    """Put the picture on the left, questions and answers on the right."""
    page = Image.new("RGB", (SIDE + 3 * MARGIN + 480, SIDE + 2 * MARGIN), "white")
    page.paste(picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS), (MARGIN, MARGIN))
    pen = ImageDraw.Draw(page)
    pen.rectangle((MARGIN - 1, MARGIN - 1, MARGIN + SIDE, MARGIN + SIDE), outline="#c0c0c0")
    for row, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True)):
        left, top = SIDE + 2 * MARGIN, MARGIN + 18 + row * LINE
        pen.text((left, top), question, font=ImageFont.load_default(18), fill="#606060")
        pen.text((left, top + 24), answer, font=ImageFont.load_default(22), fill="#101010")
    return page


if __name__ == "__main__":
    scene = find_scene(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    compose(scene, ask(scene)).save(HERE / "question.png", optimize=True)
