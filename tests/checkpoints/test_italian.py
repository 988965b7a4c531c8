"""The adapter in the box: Italian answers, beside the model's own; the same in PEFT."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from batches import BatchPlan, Phase, training_batch
from evaluate import Answerer, Item, ask_items, draw_items, in_italian, serve_answers
from italian import reword, translate
from learner import to_device_arrays
from packing import RowSize, encode
from questions import ONE_KINDS, PAIR_KINDS
from safetensors.numpy import load_file
from scenes import draw
from train_lora import ADAPTER_FOLDER, TARGET_MODULES, AdapterLearner, AdapterState, export, load

from mmjax import LLM, LoRARequest, SamplingParams
from mmjax.models.model_source import resolve_adapter
from tests.checkpoints.conftest import FEW_PROGRAMS, TINY_SCENES
from tests.checkpoints.test_tiny_scenes import Reference, plain_picture
from tests.engine.adapters import PREFIX

MODEL = TINY_SCENES / "model"
FEW = 96
GREEDY = SamplingParams(temperature=0.0, max_tokens=160)


def test_answers_are_translated() -> None:
    english = "a red star, an orange circle, a black star"
    assert translate(english) == "una stella rossa, un cerchio arancione, una stella nera"
    assert [translate(one) for one in ("yes", "none", "47", "star")] == [
        *("sì", "nessuno", "47", "stella")
    ]


def test_it_is_small_and_pefts() -> None:
    assert resolve_adapter("tiny_scenes/italian") == ADAPTER_FOLDER
    assert (ADAPTER_FOLDER / "adapter_model.safetensors").stat().st_size < 500_000
    config = json.loads((ADAPTER_FOLDER / "adapter_config.json").read_text())
    assert (config["peft_type"], config["target_modules"]) == ("LORA", TARGET_MODULES)


@pytest.fixture(scope="module")
def answer() -> Answerer:
    return serve_answers(MODEL, lora=ADAPTER_FOLDER, **FEW_PROGRAMS)


def test_it_answers_in_italian(answer: Answerer) -> None:
    items = [in_italian(item) for item in draw_items(FEW, seed=31)]
    right = ask_items(answer, items, [item.scenes for item in items])
    assert sum(right) >= 0.93 * FEW


@pytest.mark.slow  # tests/test_llm_adapters.py has a batch with adapters and without
def test_one_batch_has_both_languages() -> None:
    questions = ["What color is the circle?", "Describe the picture.", "Is there a star?"]
    content: list[Any] = [{"type": "image_pil", "image_pil": plain_picture("circle", "red")}]
    chats: list[Any] = [
        [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
        for text in questions
    ]
    italian = LoRARequest("italian", 1, "tiny_scenes/italian")
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1, **FEW_PROGRAMS}
    with LLM(max_model_len=512, use_tqdm_on_load=False, **settings) as llm:
        outputs = llm.chat(
            [*chats, *chats],
            GREEDY,
            use_tqdm=False,
            lora_request=[italian] * 3 + [None] * 3,
        )
        assert [output.outputs[0].text for output in outputs] == [
            *("rosso", "un cerchio rosso", "no"),
            *("red", "a red circle", "no"),
        ]


class AdaptedReference(Reference):
    """HF's model with PEFT's adapter in it."""

    def __init__(self) -> None:
        from peft import PeftModel

        super().__init__()
        self.model = PeftModel.from_pretrained(self.model, str(ADAPTER_FOLDER)).eval()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_gives_the_same_answers(answer: Answerer) -> None:
    items = [in_italian(one) for one in draw_items(len(ONE_KINDS + PAIR_KINDS), seed=32)]
    reference = AdaptedReference()
    assert answers_of(answer, items) == [reference.answer(item, 160) for item in items]


def answers_of(answer: Answerer, items: Sequence[Item]) -> list[str]:
    return answer([([draw(scene) for scene in item.scenes], item.question.text) for item in items])


@pytest.fixture
def learner(lenient_promotion: None) -> AdapterLearner:
    return AdapterLearner(MODEL, num_steps=300, seed=0, products="float32")


@pytest.mark.slow  # as `test_training.py` of all weights; the adapter's answers are PEFT's above
def test_steps_lower_the_loss_and_leave_an_adapter(learner: AdapterLearner, tmp_path: Path) -> None:
    size = RowSize(tokens=192, targets=96)
    plan = BatchPlan(
        pictures=2, single_rows=2, pair_rows=1, chat_rows=1, row_size=size, reword=reword
    )
    arrays = to_device_arrays(training_batch(0, 0, (Phase(start=0, plan=plan, emphasis={}),)))
    # On its device from the start, as a step returns it: else the second step is compiled anew.
    begun = AdapterState(learner.initial, learner.optimizer.init(learner.initial))
    state, losses = jax.device_put(begun, jax.devices()[0]), []
    for _ in range(30):
        state, loss = learner.update(state, learner.params, arrays)
        losses.append(float(loss))
        if losses[-1] < losses[0] - 1.0:
            break
    assert losses[-1] < losses[0] - 1.0
    export(tmp_path, state.adapter)
    for name, array in load(tmp_path).items():
        np.testing.assert_array_equal(array, state.adapter[name])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors.keys() == load_file(ADAPTER_FOLDER / "adapter_model.safetensors").keys()
    assert all(name.startswith(f"{PREFIX}language_model.layers.") for name in tensors)
    assert all(value.any() for value in tensors.values())


def test_descriptions_of_five_things_fit() -> None:
    longest = max(draw_items(600, seed=33), key=lambda item: len(item.question.answer))
    assert len(encode(translate(longest.question.answer))) < 150
    assert replace(longest, question=reword(longest.question)) == in_italian(longest)
