"""Florence-2's task answers: boxes and polygons as HF's post-processor gives them."""

import random
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.florence2.processing_florence2 import Florence2Processor

from mmjax.models.florence2.processor import VAGUE_PHRASES, Florence2ProcessingInfo, parse_answer
from mmjax.processing.items.items import ImageSize
from tests.families.florence2 import FLORENCE2

KINDS = (
    "pure_text",
    "ocr",
    "description_with_bboxes",
    "phrase_grounding",
    "polygons",
    "description_with_bboxes_or_polygons",
    "bboxes",
)


@pytest.fixture(scope="module")
def hf() -> Any:
    settings: dict[str, Any] = {kind: {} for kind in KINDS}
    settings["phrase_grounding"] = {"banned_grounding_tokens": sorted(VAGUE_PHRASES)}
    return Florence2Processor(
        CLIPImageProcessorPil.from_pretrained(FLORENCE2.path()),
        AutoTokenizer.from_pretrained(FLORENCE2.path()),
        num_additional_image_tokens=1,
        post_processor_config=settings,
    )


def loc(*bins: int) -> str:
    return "".join(f"<loc_{n}>" for n in bins)


TEXTS = [
    "</s><s>a red bus</s><pad>",
    f"</s><s>cat{loc(0, 0, 499, 999)}red bus{loc(1, 2, 3, 4, 5, 6, 7, 8, 9)}</s>",
    f"the image{loc(1, 2, 3, 4)} caf\u00e9 {loc(10, 20, 30, 40)}short{loc(1, 2, 3)}",
    f"two\nlines{loc(1, 2, 3, 4)}",
    loc(*range(12)),
    f"A SIGN{loc(*range(100, 108))}B{loc(*range(7))}C{loc(*range(900, 910))}",
    f"dog<poly>{loc(*range(6))}<sep>{loc(*range(10, 17))}</poly><poly>{loc(5, 6)}</poly>x{loc(1)}",
    f"<poly>{loc(*range(8))}</poly>",
    f"{loc(*range(9))}<sep>{loc(3)}",
    f"<sep>{loc(*range(8))}<sep><sep>",
    "<sep><sep><sep><sep>",
    f"<od>x{loc(1, 2, 3, 4)}</od>",
    "",
]


def check(hf: Any, task: str, text: str, size: ImageSize) -> dict[str, Any]:
    kind = hf.tasks_answer_post_processing_type[task]
    found = parse_answer(text, task=task, kind=kind, image_size=size)
    assert found == hf.post_process_generation(text, task=task, image_size=size), (task, text)
    return found


def test_the_tasks_that_pages_offer_are_hfs(hf: Any):
    known = sorted(hf.task_prompts_without_inputs) + sorted(hf.task_prompts_with_input)
    for prompt in Florence2ProcessingInfo.tasks.values():
        task = prompt[: prompt.index(">") + 1]
        assert task in known
        assert (task in hf.task_prompts_with_input) == (prompt != task), prompt


def test_every_task_s_answer_is_hfs(hf: Any):
    tasks = hf.tasks_answer_post_processing_type
    assert set(tasks.values()) == set(KINDS)
    found = [
        check(hf, task, text, size)
        for task in tasks
        for text in TEXTS
        for size in (ImageSize(640, 480), ImageSize(1, 3001))
    ]
    assert len({str(one) for one in found}) > 80


def test_random_answers_are_hfs(hf: Any):
    rng = random.Random(0)
    parts = ["cat", " the", "<sep>", "<poly>", "</poly>", "</s>", "\n", "\u00e9", "<od>", "<pad>"]
    for _ in range(300):
        many = [
            loc(*(rng.randrange(1000) for _ in range(rng.choice([1, 2, 4, 8]))))
            if rng.random() < 0.6
            else rng.choice(parts)
            for _ in range(rng.randint(1, 14))
        ]
        size = ImageSize(rng.randint(1, 5000), rng.randint(1, 5000))
        for task in hf.tasks_answer_post_processing_type:
            check(hf, task, "".join(many), size)


def test_every_place_is_hfs_pixel(hf: Any):
    for width, height in ((640, 480), (1023, 777), (3, 4999)):
        text = "".join(f"x{loc(n, n, 999 - n, 999 - n)}" for n in range(1000))
        check(hf, "<OD>", text, ImageSize(width, height))
