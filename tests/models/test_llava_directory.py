"""LLaVA and Pixtral from a checkpoint's directory, through `LLM`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax import LLM, SamplingParams
from mmjax.models.model_source import load_model_config
from mmjax.parity.case import Case, Parity
from mmjax.parity.reference import generate_reference
from tests.families.llava import write as write_llava
from tests.families.pixtral import write as write_pixtral_weights
from tests.kit import draw

TEXT = "what color is the circle"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def pixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pixtral_weights(tmp_path_factory.mktemp("pixtral"))


@pytest.fixture(scope="module")
def llm(llava: Path) -> Iterator[LLM]:
    with open_llm(llava) as made:
        yield made


def open_llm(path: Path, **settings: Any) -> LLM:
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    return LLM(
        str(path),
        enable_mm_embeds=True,
        use_tqdm_on_load=False,
        **sizes,
        **settings,
    )


def conversation(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]


def of_pictures(pictures: list[Any]) -> list[Any]:
    return conversation(*({"type": "image_pil", "image_pil": picture} for picture in pictures))


def chat(llm: LLM, messages: list[Any]) -> tuple[list[int], list[int]]:
    """Return the prompt and the answer."""
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,) = llm.chat(messages, greedy, use_tqdm=False)
    return list(output.prompt_token_ids), list(output.outputs[0].token_ids)


def expect(path: Path, pictures: list[Any]) -> tuple[list[int], list[int]]:
    """Return the prompt of HF's processor (ours, where that needs torchvision), HF's answer."""
    parity = Parity(load_model_config(str(path)), max_len=64)
    prompt = parity.write_prompt(TEXT, len(pictures))
    inputs = dict(parity.process_reference(Case(name="", prompt=prompt, images=pictures)))
    for name in ("input_ids", "attention_mask"):
        # The chat template, not the tokenizer, says how a conversation begins.
        inputs[name] = inputs[name][:, 1:]
    answer = generate_reference(parity.reference, inputs, 8)
    return inputs["input_ids"][0].tolist(), list(answer)


@pytest.mark.parametrize("num_pictures", [0, 1, 2])
def test_answers_are_hfs(llm: LLM, llava: Path, num_pictures: int):
    pictures = [draw(90, 40, seed) for seed in range(num_pictures)]
    assert chat(llm, of_pictures(pictures)) == expect(llava, pictures)


def test_embeddings_give_their_pictures_answer(llm: LLM):
    messages = of_pictures([draw(90, 40)])
    expected = chat(llm, messages)
    (item,) = llm.explain(messages).items
    runner = llm.engine._runner
    rows = np.asarray(runner._pool)[runner.rows.get(item.identifier)]
    assert rows.shape == (16, 64)
    part = {"type": "image_embeds", "image_embeds": rows}
    assert chat(llm, conversation(part)) == expected
    assert llm.engine.compilations == 0


def test_pixtrals_answers_are_hfs(pixtral: Path):
    pictures = [draw(90, 40), draw(20, 30)]
    with open_llm(pixtral) as llm:
        assert chat(llm, of_pictures(pictures)) == expect(pixtral, pictures)
        assert llm.engine.compilations == 0


def test_text_alone_needs_no_tower(pixtral: Path):
    """Nor does an engine that takes embeddings, of a tower whose pictures have any size."""
    with open_llm(pixtral, limit_mm_per_prompt={"image": 0}) as llm:
        assert chat(llm, conversation()) == expect(pixtral, [])
