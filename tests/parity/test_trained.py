"""The trained default against HF: states, logits, tokens, and its answers to fresh questions."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmjax import LLM, SamplingParams
from mmjax.models.model_source import load_generation_defaults, load_model_config
from mmjax.parity.case import Case, Parity
from mmjax.parity.reference import generate_reference
from tests.kit import draw

SIZES = ((640, 480), (37, 211), (1, 1))
TASK_MODULES = ("batches", "evaluate", "italian", "questions", "scenes")


@pytest.fixture(scope="module")
def parity(default_checkpoint: Path) -> Parity:
    """The default on both sides."""
    return Parity(load_model_config(str(default_checkpoint)), max_len=640)


@pytest.fixture(scope="module")
def evaluate(default_checkpoint: Path) -> Iterator[Any]:
    """The script that draws questions; scripts beside the checkpoint import each other by name."""
    folder = str(default_checkpoint.parent)
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("evaluate")
    finally:
        sys.path.remove(folder)
        for name in TASK_MODULES:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("num_images", [0, 1, 2, 3])
def test_logits_and_tokens_are_hfs(parity: Parity, num_images: int):
    case = Case(
        name=f"{num_images}",
        prompt=parity.write_prompt("What color is the circle?", num_images),
        images=[draw(*size, seed) for seed, size in enumerate(SIZES[:num_images])],
    )
    report = parity.run(case)
    assert report.is_within(1e-4), report


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_questions", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_are_hfs(
    parity: Parity, evaluate: Any, default_checkpoint: Path, num_questions: int
):
    items = evaluate.draw_items(num_questions, seed=7)
    pictures = [[evaluate.draw(scene) for scene in item.scenes] for item in items]
    prompts = [
        parity.write_prompt(item.question.text, len(shown))
        for item, shown in zip(items, pictures, strict=True)
    ]
    requests: list[Any] = [
        {"prompt": prompt, "multi_modal_data": {"image": shown}}
        for prompt, shown in zip(prompts, pictures, strict=True)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    sizes: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4}
    sizes |= {"max_num_batched_tokens": 256}  # else large steps are compiled for a few questions
    with LLM(default_checkpoint, **sizes, use_tqdm_on_load=False) as llm:
        outputs = llm.generate(requests, params, use_tqdm=False)
        ends = load_generation_defaults(llm.config.model).eos_token_ids
    tokenizer: Any = parity.processor.info.get_tokenizer()
    for prompt, shown, output in zip(prompts, pictures, outputs, strict=True):
        inputs = parity.process_reference(Case(name="", prompt=prompt, images=shown))
        tokens = generate_reference(parity.reference, inputs, 48, eos_token_ids=ends)
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        assert output.outputs[0].text == expected, prompt
